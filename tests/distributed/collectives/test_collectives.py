"""Real processes: sums through shared memory, deaths, hosts.

Progress counters: a rank that has seen a count sees the data that was written before it.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.shared_memory import ProgressCounters
from aliquot.distributed.ranks import gather
from tests.processes import as_ranks, run_ranks
from tests.tools import warm

WORKER = Path(__file__).parent / "worker.py"


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(5, marks=pytest.mark.long)])
def test_ring_sums_random_pieces_in_order(tmp_path: Path, world_size: int) -> None:
    run_ranks(WORKER, world_size, tmp_path, "sums")


def test_two_runs_at_once_on_one_host(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    runs = []
    for folder in folders:
        folder.mkdir()
        asked = json.dumps([(2, str(folder), ["sums"])])
        runs.append(
            warm.popen("-m", "tests.distributed.collectives.worker", asked, cwd=warm.REPOSITORY, stderr=subprocess.PIPE)
        )
    for run in runs:
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors


def test_a_killed_rank_is_noticed_by_all(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):  # the killed rank's status
        run_ranks(WORKER, 3, tmp_path, "killed", timeout_s=60)
    for rank in (0, 1):
        assert "has ended" in (tmp_path / f"lost-{rank}").read_text()


def test_a_killed_host_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):  # the killed rank's status
        run_ranks(WORKER, 2, tmp_path, "killed_host", timeout_s=60)
    assert (tmp_path / "lost-0").read_text() == "rank 1 has ended on another host, rank 0 waits for it in vain"


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_hosts_exchange_their_shards(tmp_path: Path, world_size: int) -> None:
    run_ranks(WORKER, world_size, tmp_path, "hosts")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_memory_per_numa_node(tmp_path: Path, world_size: int) -> None:
    run_ranks(WORKER, world_size, tmp_path, "numa")


PROGRESS = Path(__file__)


@pytest.fixture
def alone() -> Iterator[Peers]:
    peers = Peers.join(0, lambda value: [value])
    yield peers
    peers.close()


@pytest.mark.parametrize(("world_size", "rounds"), [(2, 500), (3, 300), pytest.param(4, 5000, marks=pytest.mark.long)])
def test_readers_see_whole_blocks_under_stress(tmp_path: Path, world_size: int, rounds: int) -> None:
    run_ranks(PROGRESS, world_size, tmp_path, str(rounds))


def test_waiting_works_meanwhile_and_ends_with_what_that_raises(alone: Peers) -> None:
    progress = ProgressCounters(alone, 2)
    assert progress.have_reached(0) and not progress.have_reached(1)
    progress.wait(3, 1, meanwhile=lambda: progress.publish(progress.local(1) + 1, 1))
    assert (progress.local(0), progress.local(1)) == (0, 3)

    def fail() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        progress.wait(1, meanwhile=fail)


NUMEL = 4096
BLOCKS = 3  # a rank may be ahead of the slowest reader by so many
WRITTEN, READ = 0, 1


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    """Each rank writes its blocks in turn, every element the number of the round, and reads those of all ranks."""
    peers = Peers.join(rank, gather)
    memories = [memory.tensor(0, (BLOCKS, NUMEL), torch.int64) for memory in peers.share(8 * BLOCKS * NUMEL)]
    progress = ProgressCounters(peers, 2)
    draw = random.Random(rank)
    for number in range(1, int(arguments[0]) + 1):
        progress.wait(number - BLOCKS, READ)
        memories[peers.index][number % BLOCKS].fill_(number)
        progress.publish(number, WRITTEN)
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.005)
        progress.wait(number, WRITTEN)
        for memory in memories:
            block = memory[number % BLOCKS]
            assert int(block.min()) == int(block.max()) == number
        progress.publish(number, READ)
        assert progress.local(WRITTEN) == progress.local(READ) == number
    progress.wait(number, READ)
    peers.close()


if __name__ == "__main__":
    as_ranks(work)
