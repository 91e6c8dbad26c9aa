"""`aliquot export` of a directory that is no checkpoint names the checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from aliquot.cli.main import app


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("export", "runs/x/export: this is an export, not a checkpoint: give runs/x/checkpoints/step-00000002 or"),
        (".", "runs/x: this run has no complete checkpoint"),
        ("checkpoints/step-2", "runs/x/checkpoints/step-2: no such directory; there are step-00000002, step-00000004"),
        ("checkpoints/step-00000002", "runs/x/checkpoints/step-00000002: not a complete checkpoint"),
    ],
)
def test_directory_that_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("export", "checkpoints/step-00000002", "checkpoints/step-00000004"):
        Path("runs/x", name).mkdir(parents=True)
    result = CliRunner().invoke(app, ["export", str(Path("runs/x", argument)), "out", "--merge"])
    assert result.exit_code == 2 and result.stderr.startswith(f"aliquot: {expected}"), result.stderr
    assert len(result.stderr.splitlines()) == 1 and not Path("out").exists()
