"""Ranks that hand blocks of shared memory to each other, ordered by nothing but progress counters."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.shared_memory import ProgressCounters
from aliquot.distributed.ranks import gather
from tests.processes import as_ranks

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
