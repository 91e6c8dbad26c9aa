"""Run a script as N real ranks over real gloo."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.tools import warm


@dataclass(frozen=True)
class World:
    """Ranks that meet through a file in `folder`, which must be fresh."""

    size: int
    folder: Path
    arguments: tuple[str, ...] = ()


def run_ranks(script: Path, world_size: int, folder: Path, *arguments: str, timeout_s: float = 240) -> None:
    """Runs the ranks of one world: see `run_worlds`."""
    run_worlds(script, [World(world_size, folder, arguments)], timeout_s)


def run_worlds(script: Path, worlds: list[World], timeout_s: float = 240) -> None:
    """Runs `script`, which calls `as_ranks`, for one world after the other; fails with what their ranks printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    module = ".".join(script.relative_to(warm.REPOSITORY).with_suffix("").parts)
    asked = json.dumps([(world.size, str(world.folder), world.arguments) for world in worlds])
    ranks = warm.run("-m", module, asked, env=environment, cwd=warm.REPOSITORY, timeout_s=timeout_s)
    assert ranks.returncode == 0, ranks.stdout + ranks.stderr


def as_ranks(work: Callable[[int, int, Path, list[str]], None]) -> None:
    """Forks the ranks of each world and calls `work(rank, world_size, folder, arguments)` in them.

    Forked after the imports, which take longer than the work, and before torch has started any thread.
    """
    for size, folder, arguments in json.loads(sys.argv[1]):
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                os._exit(_rank(work, rank, World(size, Path(folder), tuple(arguments))))
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            sys.exit(1)


def _rank(work: Callable[[int, int, Path, list[str]], None], rank: int, world: World) -> int:
    # What is forked has its parent's pool of threads without the threads. torch makes it anew at the next call, and not
    # well where several threads make that at once, as transformers' loading does.
    torch.set_num_threads(torch.get_num_threads())
    try:
        meet = f"file://{world.folder}/meet"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world.size)
        work(rank, world.size, world.folder, list(world.arguments))
        gc.collect()  # see machine.ranks.Ranks.close
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
        return 1
    return 0
