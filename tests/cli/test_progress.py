"""What a command says of itself where nobody looks at a terminal."""

from __future__ import annotations

import time

import pytest

from aliquot.cli import progress as progress_module
from aliquot.cli.progress import progress


@pytest.mark.parametrize(("takes_s", "told"), [(0.4, "aliquot: the second ...\n"), (0.0, "")])
def test_into_a_pipe_one_line_says_what_takes_so_long(
    takes_s: float, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "_PATIENCE_S", 0.1)
    with progress() as doing:
        doing("the first")
        doing("the second")
        time.sleep(takes_s)
    time.sleep(0.2)
    assert capsys.readouterr().err == told
