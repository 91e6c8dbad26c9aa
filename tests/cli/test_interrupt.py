"""Ctrl-C before a command has begun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_while_it_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    command = [sys.executable, "-m", "aliquot", "--version"]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "aliquot: stopped by SIGINT\n")
