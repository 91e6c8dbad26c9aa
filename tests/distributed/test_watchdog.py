"""IdleWatchdog with real processes: an idle run ends, a run with one working rank goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from aliquot.distributed.liveness import idle_watchdog, liveness, watchdog
from aliquot.distributed.rank_errors import RankError
from aliquot.distributed.topology import Topology
from tests.distributed.launcher import JOIN, failure, run

WATCHED = (
    JOIN
    + """
import subprocess
from aliquot.distributed.liveness.idle_watchdog import IdleWatchdog
from aliquot.distributed.liveness.watchdog import WatchedRank
own = Path(sys.argv[1]) / f"still-rank-{ranks.rank}.txt"
def waits_for_a_file_that_does_not_come():
    time.sleep(600)
def computes(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(200_000))
        time.sleep(0.02)
def has_it_computed(seconds):
    code = f"import time; t = time.time() + {seconds}\\nwhile time.time() < t: sum(range(200_000)); time.sleep(0.02)"
    subprocess.run([sys.executable, "-c", code], check=True)
def writes(seconds):
    with open(own.with_name("written"), "wb", buffering=0) as file:
        for _ in range(round(seconds / 0.04)):
            file.write(bytes(4096))
            os.fsync(file.fileno())
            time.sleep(0.04)
with IdleWatchdog(WatchedRank(topology, 2.0, lambda: "loading weights", own.parent), ranks.store):
"""
)


WAITS = """
    try:
        waits_for_a_file_that_does_not_come() if ranks.rank == 1 else ranks.barrier()
    except Exception as error:  # rank 0 has lost the connection to rank 1, which has ended first
        from aliquot.distributed.rank_errors import report_error
        sys.exit(report_error(error))
"""


def test_idle_run_ends_and_names_the_stuck_rank(tmp_path: Path) -> None:
    body = WATCHED + WAITS
    line = failure(tmp_path, body, str(tmp_path))[0]
    assert "no rank has computed, read or written anything for 2 s (launch.step_timeout_s)" in line
    assert "while loading weights; rank 1 stands still at rank.py:" in line
    assert (
        f"in waits_for_a_file_that_does_not_come, and the others wait for it; where every rank was: {tmp_path}" in line
    )
    assert line.endswith("/still-rank-*.txt [hung]")
    assert "barrier" in (tmp_path / "still-rank-0.txt").read_text()


@pytest.mark.long
def test_idle_run_ends_though_stacks_cannot_be_written(tmp_path: Path) -> None:
    """Opening a pipe without a reader waits, as a file server does that does not answer."""
    body = WATCHED.replace("with IdleWatchdog", "os.mkfifo(own)\nwith IdleWatchdog") + WAITS
    line = failure(tmp_path, body, str(tmp_path))[0]
    assert "no rank has computed, read or written anything for 2 s (launch.step_timeout_s)" in line


def test_idle_watchdog_counts_writes_of_the_kernel_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    left, waits = iter([9, 7, 8, 7, 6, 5]), iter([True, True, False])
    monkeypatch.setattr(idle_watchdog, "unwritten_bytes", lambda: next(left))
    monkeypatch.setattr(idle_watchdog, "_waits_for_disk", lambda: next(waits))
    monkeypatch.setattr(idle_watchdog, "_io_bytes", lambda process: (0, 0))
    work = idle_watchdog._WorkMeter()  # which looks once
    assert [work.has_worked(1e6) for _ in range(4)] == [False, False, True, False]


@pytest.mark.parametrize(
    "work", ["has_it_computed", *(pytest.param(work, marks=pytest.mark.long) for work in ("computes", "writes"))]
)
def test_one_working_rank_keeps_run_alive(tmp_path: Path, work: str) -> None:
    body = WATCHED + f"    {work}(3) if ranks.rank == 1 else None\n    ranks.barrier()\nprint('done')\n"
    code, out, err = run(tmp_path, body, str(tmp_path))
    assert (code, err) == (0, "") and "done" in out
    assert not list(tmp_path.glob("still-rank-*"))


@pytest.mark.long
def test_stopped_process_is_not_idle(tmp_path: Path) -> None:
    """A process that was stopped and continued has made no checks meanwhile."""
    body = """
        import os, signal, subprocess, sys, time
        from pathlib import Path
        from aliquot.distributed.liveness.idle_watchdog import IdleWatchdog
        from aliquot.distributed.liveness.watchdog import WatchedRank
        from aliquot.distributed.topology import Topology
        alone = Topology(0, 1, 0, 1, 0, 1, "cpu", 1, ())
        with IdleWatchdog(WatchedRank(alone, 2.0, lambda: "planning", Path(sys.argv[1])), None):
            time.sleep(0.5)
            subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)
    """
    code, _, err = run(tmp_path, body, str(tmp_path))
    assert (code, err) == (0, "")


def test_lost_node_explains_a_hang(tmp_path: Path) -> None:
    """The watchdog's time is over before the heartbeat's, which begins when the node is lost."""
    body = """
        import os, sys, time
        from pathlib import Path
        from aliquot.distributed.liveness.heartbeat import Heartbeat
        from aliquot.distributed.liveness.liveness import StepWatchdog
        from aliquot.distributed.liveness.watchdog import WatchedRank
        from aliquot.distributed.topology import Topology
        if os.environ["RANK"] == "1":
            time.sleep(600)
        class SilentStore:
            clone = lambda self: self
            set = lambda self, key, value: None
            check = lambda self, keys: False
        first_of_two_nodes = Topology(0, 2, 0, 1, 0, 2, "cpu", 1, ())
        heartbeat = Heartbeat(first_of_two_nodes, SilentStore(), 3.0, lambda: "saving step 1")
        stacks = Path(sys.argv[1]) / "stacks-rank-0.txt"
        rank = WatchedRank(
            first_of_two_nodes, 2.3, lambda: "saving step 1", explain_hang=heartbeat.explain_hang
        )
        with heartbeat, StepWatchdog(rank, stacks, grace_s=0.1):
            time.sleep(600)
    """
    line = failure(tmp_path, body, str(tmp_path))[0]
    assert "no word from node 1 for 2 s" in line and "while node 0 was saving step 1" in line
    assert line.endswith("[peer-lost]")


@pytest.mark.parametrize("agreed", [False, True])
def test_step_that_does_not_end_after_a_stop_signal_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agreed: bool
) -> None:
    """Another rank may have died, while launch.step_timeout_s and checkpoint.grace_s are long."""
    errors: list[RankError] = []
    ended = threading.Event()

    def end_rank(error: RankError) -> None:
        errors.append(error)
        ended.set()

    monkeypatch.setattr(watchdog, "end_rank", end_rank)
    monkeypatch.setattr(liveness, "_LEAST_LATE_S", 0.2)
    rank = watchdog.WatchedRank(Topology(0, 2, 0, 2, 0, 1, "cpu", 1, ()), 1e6, lambda: "in step 8")
    with liveness.StepWatchdog(rank, tmp_path / "stacks-rank-0.txt", grace_s=0.1) as watched:
        watched.beat()
        watched.hurry()
        if agreed:
            watched.relax()
        assert ended.wait(0.6 if agreed else 20) is not agreed
    if not agreed:
        assert "no progress for 0.2 s since a stop signal arrived, while in step 8" in errors[0].message
