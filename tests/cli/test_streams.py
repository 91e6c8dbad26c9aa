"""Terminals that are not UTF-8, and an interpreter that transformers cannot run in."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from aliquot.cli.main import run


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
