"""Profiles that cannot be written: one line that names the file, and nothing of them stays on the full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from aliquot.errors import StorageError
from aliquot.observe.clock import StepClock
from aliquot.observe.profile import Profile


@pytest.mark.parametrize("full", ["rank-0.json.gz", "rank-0.txt"])
def test_a_full_disk(tmp_path: Path, full: str) -> None:
    (tmp_path / full).symlink_to("/dev/full")
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
