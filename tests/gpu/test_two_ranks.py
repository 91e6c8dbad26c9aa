"""Two ranks on one GPU, over gloo: the collectives of sharding without a second GPU. With NCCL it takes two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.gpu.on_device import DEVICE, needs_device

pytestmark = needs_device


def told(folder: Path, world_size: int, engine: str) -> list[list[float]]:
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.gpu.two_ranks_worker",
                str(rank),
                str(world_size),
                str(folder),
                DEVICE,
                engine,
            ],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            cwd=REPOSITORY,
        )
        for rank in range(world_size)
    ]
    try:
        assert [rank.wait(150) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"{world_size}-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize("engine", ["fsdp", "replicas", "host"])
def test_two_train_as_one_does(tmp_path: Path, engine: str) -> None:
    (one,), (first, second) = told(tmp_path, 1, engine), told(tmp_path, 2, engine)
    assert first == second == pytest.approx(one, rel=1e-5)
