"""Run a script as N real ranks over real gloo."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


def run_ranks(script: Path, world_size: int, folder: Path, *arguments: str, timeout_s: float = 240) -> None:
    """Runs `script WORLD_SIZE FOLDER ARGUMENTS...`, which calls `as_ranks`; fails with what its ranks printed.

    The ranks meet through a file in `folder`, which must be fresh.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-m",
        f"tests.{script.parent.name}.{script.stem}",
        str(world_size),
        str(folder),
        *arguments,
    ]
    ranks = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert ranks.returncode == 0, ranks.stdout + ranks.stderr


def as_ranks(work: Callable[[int, int, Path, list[str]], None]) -> None:
    """Forks a rank for each of WORLD_SIZE and calls `work(rank, world_size, folder, arguments)` in it.

    Forked after the imports, which take longer than the work, and before torch has started any thread.
    """
    world_size, folder = int(sys.argv[1]), Path(sys.argv[2])
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os._exit(_rank(work, rank, world_size, folder))
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


def _rank(work: Callable[[int, int, Path, list[str]], None], rank: int, world_size: int, folder: Path) -> int:
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
        work(rank, world_size, folder, sys.argv[3:])
        gc.collect()  # see machine.ranks.Ranks.close
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
        return 1
    return 0
