"""Run a script as N real ranks over real gloo and collect what each wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(script: Path, world_size: int, folder: Path, *arguments: str, timeout_s: float = 240) -> None:
    """Runs `script RANK WORLD_SIZE FOLDER ARGUMENTS...` once a rank; fails with the output of the ranks that failed.

    The ranks meet through a file in `folder`, which must be fresh.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world_size), str(folder), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [
        f"rank {i}:\n{output}" for i, (rank, output) in enumerate(zip(ranks, outputs, strict=True)) if rank.returncode
    ]
    assert not failed, "\n".join(failed)
