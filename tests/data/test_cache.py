"""Cached directories are verified before they are used; hashes of files are kept while the files are as they were."""

from __future__ import annotations

import hashlib
import os
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from aliquot.core.decode import publish_checked_json, read_checked_json
from aliquot.data.cache import cached, damage, digests
from tests.tensor_io.world import run_world


def make_two_files(directory: Path) -> None:
    (directory / "one").write_bytes(bytes(100))
    (directory / "two").write_text("two")


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        (lambda path: (path / "one").write_bytes(bytes(99) + b"\1"), "one is damaged"),
        (lambda path: (path / "one").write_bytes(bytes(50)), "one is damaged"),
        (lambda path: (path / "one").write_bytes(b""), "one is damaged"),
        (lambda path: (path / "two").unlink(), "two is damaged"),
        (lambda path: ((path / "two").unlink(), os.mkfifo(path / "two")), "two is damaged"),
        (lambda path: (path / ".checksums").unlink(), "checksums of its files are missing"),
        (lambda path: (path / ".checksums").write_text("[" * 200_000), "checksums of its files are damaged"),
        (lambda path: (path / ".checksums").write_text('{"files": {}}'), "checksums of its files are damaged"),
    ],
)
def test_damaged_directory_is_made_again_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: Callable[[Path], object], says: str
) -> None:
    directory = cached(tmp_path / "cache" / "key", make_two_files)
    assert damage(directory) is None and not caplog.messages
    assert cached(directory, lambda _: pytest.fail("is intact")) == directory
    damaged(directory)
    cached(directory, make_two_files)
    (warning,) = caplog.messages
    assert warning.startswith(f"data cache: {directory}: ") and says in warning
    assert damage(directory) is None and (directory / "one").read_bytes() == bytes(100)
    assert [path.name for path in directory.parent.iterdir()] == ["key"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("limit", "cause"),
    [
        (
            partial(resource.setrlimit, resource.RLIMIT_NOFILE, (3, 3)),
            "too many open files: this process may open 3. Raise the limit (ulimit -n)",
        ),
        (
            partial(os.setuid, 65534),
            "cannot read the data cache: Permission denied; set data.cache_directory to a directory of this user",
        ),
    ],
)
def test_cache_that_cannot_be_read_is_not_called_damaged(limit: Callable[[], object], cause: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        directory = cached(Path(folder) / "key", make_two_files)
        (error,) = run_world(1, lambda _: (limit(), damage(directory)))
        assert error.line == f"{directory}/.checksums: {cause} [disk]"
        assert damage(directory) is None


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
    kept = read_checked_json(kept_in)
    assert kept is not None
    kept[str(file)][1] = "kept"
    publish_checked_json(kept_in, kept)
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
    assert list(read_checked_json(kept_in) or ()) == [str(file)]


def test_digest_of_a_fresh_file_is_not_cached(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    assert digests([file], tmp_path / "cache") == [sha("one")]
    (kept_in,) = (tmp_path / "cache" / "digests").iterdir()
    assert read_checked_json(kept_in) == {}


def test_a_damaged_or_absent_cache_costs_time_only(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    digests([file], tmp_path / "cache")
    (kept_in,) = (tmp_path / "cache" / "digests").iterdir()
    kept = kept_in.read_text().replace(sha("one"), sha("two"))
    for damaged in ("", "[1]", '{"x"', "[" * 200_000, f'{{"{file}": 5}}', kept):
        kept_in.write_text(damaged)
        assert digests([file], tmp_path / "cache") == [sha("one")]
    assert digests([file], file) == [sha("one")]
