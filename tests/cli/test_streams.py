"""Terminals that are not UTF-8, and none at all."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from aliquot.cli.main import run


def test_a_sign_that_the_terminal_does_not_have_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["aliquot", "--version"])
    with pytest.raises(SystemExit):
        run()
    print("\ufffd and \u00e9", flush=True)
    assert written.getvalue().splitlines()[-1] == b"? and \xe9"


def test_closed_streams_stay_nobody_s() -> None:
    code = """
import sys
sys.argv = ["aliquot", "--version"]
from aliquot.cli.main import run
try:
    run()
finally:
    file = open("/dev/zero")
    assert file.fileno() > 2, file.fileno()
    print("nobody hears this")
"""
    shell = ["sh", "-c", '"$0" -c "$1" <&- >&-', sys.executable, code]
    result = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
