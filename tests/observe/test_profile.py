"""Profiles that cannot be written: one line that names the file, and nothing of them stays on the full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from aliquot.core.errors import StorageError
from aliquot.observe import profile as profiling
from aliquot.observe.profile import Profile
from aliquot.observe.step_clock import StepClock


@pytest.mark.parametrize("full", ["rank-0.json.gz", "rank-0.txt"])
def test_a_full_disk(tmp_path: Path, full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if full == "rank-0.txt":
        monkeypatch.setattr(profiling, "publish_text", write)
    else:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", write)
    profile = Profile(tmp_path, 0, 1, StepClock(lambda: (0.0, 0.0)))
    for _ in range(3):
        profile.step()
    with pytest.raises(StorageError, match="No space left on device") as told:
        profile.step()
    assert full in str(told.value)
    assert not list(tmp_path.iterdir())
    profile.step()
    profile.finish()
    assert not list(tmp_path.iterdir()) and not profile.missed


def test_a_file_where_the_directory_would_be(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("mine")
    profile = Profile(tmp_path / "profile", 0, 1, StepClock(lambda: (0.0, 0.0)))
    for _ in range(3):
        profile.step()
    with pytest.raises(StorageError, match="File exists"):
        profile.step()
    assert (tmp_path / "profile").read_text() == "mine"
