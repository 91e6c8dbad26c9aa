"""The lock of a run directory on file systems without locks: a living holder keeps it, a dead one does not."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from aliquot.core import run_lock
from aliquot.core.errors import RunDirectoryError
from aliquot.core.run_lock import BEATING_LOCK, LOCK
from aliquot.machine.facts import Mount, mount_of
from aliquot.observe import run_directory
from aliquot.observe.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(run_lock, "WATCH_S", 0.5)


def test_second_run_is_refused_and_first_leaves_no_lock(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").lock.hold():
        (tmp_path / "run" / "config.yaml").write_text("")
        with pytest.raises(RunDirectoryError, match="another process"), RunDirectory(tmp_path / "run").lock.hold():
            pass
        assert (tmp_path / "run" / BEATING_LOCK).exists()
    assert not (tmp_path / "run" / BEATING_LOCK).exists()
    with RunDirectory(tmp_path / "run").lock.hold():
        pass


def test_run_that_lost_its_lock_publishes_nothing(tmp_path: Path) -> None:
    """Another machine has taken a suspended machine for dead."""
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with first.lock.hold():
        first.check_publish()
        (tmp_path / "run" / BEATING_LOCK).unlink()
        with second.lock.hold():
            second.check_publish()
            with pytest.raises(RunDirectoryError, match="no longer holds its lock"):
                first.check_publish()


def test_beating_lock_replaces_locks_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre and NFS may have local locks: a run on another machine gets the same lock."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    for local in (False, True):
        mount = Mount("lustre", frozenset({"rw", "localflock"} if local else {"rw", "flock"}))
        monkeypatch.setattr(run_directory, "mount_of", lambda _, mount=mount: mount)
        refusal = pytest.raises(RunDirectoryError, match="another process") if local else nullcontext()
        with RunDirectory(tmp_path / "run").lock.hold(), refusal, RunDirectory(tmp_path / "run").lock.hold():
            pass


def test_mount_of_the_nearest_directory_above(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    lines = ["/dev/a / ext4 rw,relatime 0 0", "fsx:/x /fsx lustre rw,localflock 0 0", "srv:/h /my\\040home nfs4 rw 0 0"]
    lines += [
        "srv:/i /fsx/nfs nfs rw,local_lock=all 0 0",
        "/dev/b /media/M\udcfc\x0cll vfat rw 0 0",
        "x /a\\134b nfs nolock 0 0",
    ]
    (tmp_path / "proc" / "mounts").write_bytes(os.fsencode("\n".join([*lines, ""])))
    assert mount_of(Path("/a\\b/c"), tmp_path).locks_are_local and not mount_of(Path("/a/c"), tmp_path).locks_are_local
    result = {place: mount_of(Path(place), tmp_path) for place in ("/home/x", "/fsx/runs", "/fsx/nfs/a", "/my home/b")}
    assert [mount.kind for mount in result.values()] == ["ext4", "lustre", "nfs", "nfs4"]
    assert [mount.locks_are_local for mount in result.values()] == [False, True, True, False]
    assert mount_of(Path("/x"), tmp_path / "none").kind == "unknown file system"


@pytest.mark.parametrize("reused", [False, True])
def test_lock_of_killed_local_run_is_taken_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reused: bool
) -> None:
    """Also where its process id is another process's now: a restarted container has the ids of the one before."""
    monkeypatch.setattr(run_lock, "WATCH_S", 1e6)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    holder = {"pid": os.getpid(), "started": 1} if reused else {"pid": dead.pid}
    (tmp_path / BEATING_LOCK).write_text(json.dumps({"machine": run_lock.namespace_id("pid"), "mark": "x", **holder}))
    with RunDirectory(tmp_path).lock.hold():
        pass


@pytest.mark.parametrize("beats", [True, False])
def test_lock_of_another_machine_is_watched(tmp_path: Path, beats: bool) -> None:
    file = tmp_path / BEATING_LOCK
    file.write_text(json.dumps({"machine": "another", "pid": 1, "mark": "x"}))
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(file)

    if not beats:
        with RunDirectory(tmp_path).lock.hold():
            assert json.loads(file.read_text())["pid"] == os.getpid()
        return
    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(RunDirectoryError, match="another process"), RunDirectory(tmp_path).lock.hold():
            pass
    finally:
        over.set()
        beating.join()
    assert file.exists()  # it is the other one's


def test_faster_process_keeps_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes find the holder dead: the other one creates its lock between the check and the removal here."""
    file = tmp_path / BEATING_LOCK
    file.write_text(json.dumps({"machine": run_lock.namespace_id("pid"), "pid": 0, "mark": "dead"}))
    faster = {"machine": run_lock.namespace_id("pid"), "pid": os.getpid(), "mark": "faster"}
    read, looks = run_lock._read, iter([None, json.dumps(faster)])

    def looked(at: Path) -> object:
        result = read(at)
        if taken := next(looks, None):
            file.write_text(taken)
        return result

    monkeypatch.setattr(run_lock, "_read", looked)
    with pytest.raises(RunDirectoryError, match="another process"), RunDirectory(tmp_path).lock.hold():
        pass
    assert json.loads(file.read_text()) == faster
    assert {path.name for path in tmp_path.iterdir()} == {file.name, LOCK}


def test_beat_is_seen_despite_cached_attributes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / BEATING_LOCK
    file.write_text("")
    remembered, stat = file.stat(), Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: remembered if path == file else stat(path, **how))
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: os.utime(file))
    assert run_lock._is_alive(file, {"machine": "another"})
