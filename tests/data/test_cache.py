"""Hashes that are kept: taken while a file is as it was, made again when it is not, never for one just written."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from aliquot.data.cache import digests


def settled(file: Path, content: str) -> Path:
    """Written, as far as the kept hashes are concerned, long ago: their limit is on both times of a file."""
    file.write_text(content)
    os.utime(file)
    while max(file.stat().st_mtime, file.stat().st_ctime) > time.time() - 2.1:
        time.sleep(0.1)
    return file


def sha(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def test_cache_lasts_until_a_file_changes(tmp_path: Path) -> None:
    cache, file, other = tmp_path / "cache", tmp_path / "a.txt", tmp_path / "b.txt"
    other.write_text("other")
    settled(file, "old")
    assert digests([file, other], cache) == [sha("old"), sha("other")]
    (kept_in,) = (cache / "digests").iterdir()
    kept = json.loads(kept_in.read_text())
    kept[str(file)][1] = "kept"
    kept_in.write_text(json.dumps(kept))
    assert digests([file, other], cache) == ["kept", sha("other")], "the file was read again"
    before = file.stat()
    file.write_text("new")  # as long as before, and as old, as a careful copy would leave it
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests([file, other], cache) == [sha("new"), sha("other")]


def test_cache_ignores_mtime_and_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an archive of another machine may lie years ahead; a server's clock may be ahead of this one's."""
    file = tmp_path / "a.txt"
    file.write_text("one")
    os.utime(file, (2**32, 2**32))
    changed_ns = file.stat().st_ctime_ns
    time.sleep(0.2)
    monkeypatch.setattr("aliquot.data.cache._COARSEST_CLOCK_S", 0.1)
    monkeypatch.setattr(time, "time_ns", lambda: changed_ns - 3600 * 10**9)
    digests([file], tmp_path / "cache")
    (kept_in,) = (tmp_path / "cache" / "digests").iterdir()
    assert list(json.loads(kept_in.read_text())) == [str(file)]


def test_digest_of_a_fresh_file_is_not_cached(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    assert digests([file], tmp_path / "cache") == [sha("one")]
    (kept_in,) = (tmp_path / "cache" / "digests").iterdir()
    assert json.loads(kept_in.read_text()) == {}


def test_a_damaged_or_absent_cache_costs_time_only(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    digests([file], tmp_path / "cache")
    (kept_in,) = (tmp_path / "cache" / "digests").iterdir()
    for damage in ("", "[1]", '{"x"'):
        kept_in.write_text(damage)
        assert digests([file], tmp_path / "cache") == [sha("one")]
    assert digests([file], file) == [sha("one")]
