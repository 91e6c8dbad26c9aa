"""The completion that typer installs, in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


@pytest.mark.skipif(not (BIN / "aliquot").exists(), reason="needs the installed `aliquot` command")
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "offered"), [("aliquot rep", ["report"]), ("aliquot report --o", ["--out"]), ("aliquot nothing", [])]
)
def test_bash_completes_commands_and_options(typed: str, offered: list[str]) -> None:
    script = """
        eval "$(aliquot --show-completion bash)"
        COMP_WORDS=($TYPED) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$TYPED
        _aliquot_completion aliquot
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    result = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "TYPED": typed, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert result.stdout.split() == offered, result.stderr
