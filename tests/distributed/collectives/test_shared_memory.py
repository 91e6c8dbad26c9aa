"""Progress counters: a rank that has seen a count sees the data that was written before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.shared_memory import ProgressCounters
from tests.processes import run_ranks

WORKER = Path(__file__).parent / "progress_worker.py"


@pytest.fixture
def alone() -> Iterator[Peers]:
    peers = Peers.join(0, lambda value: [value])
    yield peers
    peers.close()


@pytest.mark.parametrize(("world_size", "rounds"), [(2, 500), (3, 300), pytest.param(4, 5000, marks=pytest.mark.long)])
def test_readers_see_whole_blocks_under_stress(tmp_path: Path, world_size: int, rounds: int) -> None:
    run_ranks(WORKER, world_size, tmp_path, str(rounds))


def test_waiting_works_meanwhile_and_ends_with_what_that_raises(alone: Peers) -> None:
    progress = ProgressCounters(alone, 2)
    assert progress.have_reached(0) and not progress.have_reached(1)
    progress.wait(3, 1, meanwhile=lambda: progress.publish(progress.local(1) + 1, 1))
    assert (progress.local(0), progress.local(1)) == (0, 3)

    def fail() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        progress.wait(1, meanwhile=fail)
