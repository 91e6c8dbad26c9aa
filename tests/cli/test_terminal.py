"""Tables on a terminal of 80 columns, and progress without a terminal.

Terminals that are not UTF-8, and an interpreter that transformers cannot run in.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from aliquot.catalogue.instances import instances
from aliquot.cli import terminal
from aliquot.cli.instances_command import _OPTIONAL_COLUMNS, _columns
from aliquot.cli.main import run
from aliquot.cli.terminal import progress, show_table

CONTENT = {"type": ["c7i.48xlarge", "p5.48xlarge"], "GPU": ["", "8 H100"], "USD": ["1,234.567", "98,765.432"]}


def shown(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show_table(CONTENT, ("GPU",), ("type",), console=console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_table_omits_a_column_before_it_cuts_a_number() -> None:
    wide, narrow = shown(80), shown(26)
    assert "8 H100" in wide[2] and "98,765.432" in wide[2] and len(wide) == 3
    assert "98,765.432" in narrow[2] and "8 H100" not in narrow[2]
    assert narrow[3:] == ["left out, for a terminal of 26 columns: GPU"]


def test_the_catalogue_fits_80_columns() -> None:
    types = [each for each in instances() if each.name.startswith(("c7i.", "p5."))]
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    show_table(_columns(types, None), _OPTIONAL_COLUMNS, ("type",), console=console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines[: len(types) + 1])) <= 80 and not any("…" in line for line in lines)
    assert all(head in lines[0] for head in ("type", "cores", "GiB", "GPU", "USD/h"))


@pytest.mark.parametrize(("takes_s", "told"), [(0.4, "aliquot: the second ...\n"), (0.0, "")])
def test_progress_into_a_pipe_is_one_line_after_a_delay(
    takes_s: float, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_PATIENCE_S", 0.1)
    with progress() as doing:
        doing("the first")
        doing("the second")
        time.sleep(takes_s)
    time.sleep(0.2)
    assert capsys.readouterr().err == told


def test_letter_that_the_terminal_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["aliquot", "--version"])
    with pytest.raises(SystemExit):
        run()
    print("\ufffd and \u00e9", flush=True)
    assert written.getvalue().splitlines()[-1] == b"? and \xe9"


def test_python_without_docstrings_is_refused() -> None:
    command = [sys.executable, "-m", "aliquot", "--version"]
    environ = {**os.environ, "PYTHONOPTIMIZE": "2"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert result.returncode == 2 and result.stderr.startswith("aliquot: PYTHONOPTIMIZE=2 or python -OO removes")
    assert result.stderr.count("\n") == 1 and not result.stdout
    environ["PYTHONOPTIMIZE"] = "1"
    assert subprocess.run(command, capture_output=True, check=False, env=environ).returncode == 0
