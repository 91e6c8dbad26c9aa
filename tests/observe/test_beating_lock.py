"""A run directory on a file system without locks: who lives keeps it, who is dead does not."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aliquot.errors import RunDirectoryError
from aliquot.observe import beating_lock
from aliquot.observe.run_directory import BEATING_LOCK, RunDirectory


@pytest.fixture(autouse=True)
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(beating_lock, "WATCHED_S", 0.5)


def test_a_second_run_is_refused_and_the_first_leaves_nothing(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").locked():
        (tmp_path / "run" / "config.yaml").write_text("")
        with pytest.raises(RunDirectoryError, match="another process"), RunDirectory(tmp_path / "run").locked():
            pass
        assert (tmp_path / "run" / BEATING_LOCK).exists()
    assert not (tmp_path / "run" / BEATING_LOCK).exists()
    with RunDirectory(tmp_path / "run").locked():
        pass


def test_of_a_killed_run_on_this_machine_it_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beating_lock, "WATCHED_S", 1e6)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / BEATING_LOCK).write_text(json.dumps({"machine": beating_lock.machine(), "pid": dead.pid, "mark": "x"}))
    with RunDirectory(tmp_path).locked():
        pass


def test_a_process_with_the_id_of_the_dead_one_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that is started again has the process ids that it had, and that of its namespace."""
    monkeypatch.setattr(beating_lock, "WATCHED_S", 1e6)
    before = {"machine": beating_lock.machine(), "pid": os.getpid(), "started": 1, "mark": "x"}
    (tmp_path / BEATING_LOCK).write_text(json.dumps(before))
    with RunDirectory(tmp_path).locked():
        pass


@pytest.mark.parametrize("beats", [True, False])
def test_of_another_machine_it_is_watched(tmp_path: Path, beats: bool) -> None:
    file = tmp_path / BEATING_LOCK
    file.write_text(json.dumps({"machine": "another", "pid": 1, "mark": "x"}))
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(file)

    if not beats:
        with RunDirectory(tmp_path).locked():
            assert json.loads(file.read_text())["pid"] == os.getpid()
        return
    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(RunDirectoryError, match="another process"), RunDirectory(tmp_path).locked():
            pass
    finally:
        over.set()
        beating.join()
    assert file.exists()  # it is the other one's
