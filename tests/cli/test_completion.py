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
def test_bash_completes_commands_and_options() -> None:
    script = """
        eval "$(aliquot --show-completion bash)"
        for COMP_LINE in "aliquot rep" "aliquot report --o" "aliquot nothing"; do
            COMP_WORDS=($COMP_LINE) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
            _aliquot_completion aliquot
            echo "$COMP_LINE: ${COMPREPLY[@]}"
        done
    """
    result = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    offered = ["aliquot rep: report", "aliquot report --o: --out", "aliquot nothing: "]
    assert result.stdout.splitlines() == offered, result.stderr
