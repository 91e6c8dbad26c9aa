"""The start-up check of fsdp looks at the path that carries its collectives."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aliquot.core.errors import TrainingError
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.ranks import gather
from aliquot.distributed.topology import Topology
from aliquot.engines.fsdp.fsdp_collectives import StagingBuffer, check_collectives
from aliquot.engines.fsdp.fsdp_shards import Division
from aliquot.engines.global_norm import global_norm_on_device
from tests.processes import as_ranks, run_ranks

WORKER = Path(__file__)


@pytest.mark.parametrize("kind", ["gloo", "sound"])
def test_check_passes_working_collectives(tmp_path: Path, kind: str) -> None:
    run_ranks(WORKER, 2, tmp_path, kind)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["passed", "passed"]


def test_check_fails_if_shared_memory_shows_nothing(tmp_path: Path) -> None:
    run_ranks(WORKER, 2, tmp_path, "deaf")
    for rank in range(2):
        assert "a reduce-scatter of known numbers gave" in (tmp_path / f"{rank}.txt").read_text()


class Deaf(StagingBuffer):
    def exchange(self, values: Tensor) -> list[Tensor]:
        views = super().exchange(values)
        return [view if member == self.peers.index else torch.zeros_like(values) for member, view in enumerate(views)]


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    """Check fsdp's collectives with sound or deaf shared memory: deaf memory receives nothing from other ranks."""
    stages = {"sound": StagingBuffer, "deaf": Deaf}
    kind = stages.get(arguments[0])
    stage = None if kind is None else kind(Peers.join(rank, gather))
    try:
        division = Division.join(False, Topology(rank, world_size, rank, world_size, 0, 1, "cpu", 1, ()))
        check_collectives(torch.device("cpu"), stage, division)
        with warnings.catch_warnings(action="error"):  # a warning would be printed by every rank
            assert global_norm_on_device([torch.tensor([3.0 + rank])]) == 5
        outcome = "passed"
    except TrainingError as error:
        outcome = str(error)
    (folder / f"{rank}.txt").write_text(outcome)


if __name__ == "__main__":
    as_ranks(work)
