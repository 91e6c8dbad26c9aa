"""Terminals that are not UTF-8."""

from __future__ import annotations

import io
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
