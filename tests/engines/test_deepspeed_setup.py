"""DeepSpeed's compiled ops: a missing tool is one line; the lock of a killed build is removed, a live one is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aliquot.core.errors import UserError
from aliquot.engines.deepspeed.deepspeed_setup import prepare_ops


def test_missing_tools_are_named_with_their_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    with pytest.raises(UserError, match=r"apt install g\+\+.* and pip install ninja; the engines host and fsdp"):
        prepare_ops()


def test_only_an_abandoned_lock_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("g++", "ninja"):
        (tmp_path / tool).touch(0o755)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    names = ("abandoned", "held", "young")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    for name in ("abandoned", "held"):
        os.utime(tmp_path / name / "lock", (1, 1))
    with (tmp_path / "held" / "lock").open():
        prepare_ops()
    assert [name for name in names if (tmp_path / name / "lock").exists()] == ["held", "young"]
