"""Two real ranks that pass numbers to each other in every way that training does, and multiply matrices at once.

`python -m aliquot.doctor.two_ranks` is one of them, by torchrun's variables; rank 0 prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from aliquot.config.schema import LaunchSection
from aliquot.distributed.collectives.json_values import gather
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.reduce import add_sum
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.topology import place
from aliquot.machine.cpu import read_cpu
from aliquot.machine.matmul import matmul_rate

_TIMEOUT_S = 60.0
_NUMEL = 1 << 16
_PRECISIONS: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")


def main() -> None:
    topology, _ = place(LaunchSection(), os.environ, read_cpu(), "cpu")
    ranks = Ranks.join(topology, _TIMEOUT_S, join_timeout_s=_TIMEOUT_S)
    wrong = [name for name, right in examine(ranks).items() if not right]
    rates = {precision: ranks.gather(matmul_rate("cpu", precision, ranks.barrier)) for precision in _PRECISIONS}
    told: dict[str, Any] = {"wrong": ranks.gather(wrong), "rates": rates, "threads": topology.threads}
    if ranks.rank == 0:
        print(json.dumps(told))
        sys.stdout.flush()
    ranks.close()


def examine(ranks: Ranks) -> dict[str, bool]:
    """Whether each way of passing numbers gave the right ones on this rank. Collective."""
    values = [torch.arange(_NUMEL, dtype=torch.float32) * (rank + 1) for rank in range(ranks.world_size)]
    own, total = values[ranks.rank], sum(values, torch.zeros(_NUMEL))
    return {
        "all-gather by gloo": _all_gather(own, values),
        "reduce-scatter by gloo": _reduce_scatter(own, total, ranks),
        "average by FSDP2 on gloo": _average(ranks),
        "sum in shared memory": _shared_sum(own, total, ranks),
    }


def _all_gather(own: torch.Tensor, values: list[torch.Tensor]) -> bool:
    received = [torch.empty_like(own) for _ in values]
    dist.all_gather(received, own)
    return all(torch.equal(found, expected) for found, expected in zip(received, values, strict=True))


def _reduce_scatter(own: torch.Tensor, total: torch.Tensor, ranks: Ranks) -> bool:
    found = torch.empty(_NUMEL // ranks.world_size)
    dist.reduce_scatter_tensor(found, own)
    return torch.equal(found, total.view(ranks.world_size, -1)[ranks.rank])


def _average(ranks: Ranks) -> bool:
    """The gradient of a weight whose input is rank + 1 everywhere: its mean is that of 1 .. world size."""
    layer = torch.nn.Linear(4, 4, bias=False)
    fully_shard(layer)
    layer(torch.full((1, 4), float(ranks.rank + 1))).sum().backward()
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    expected = torch.full((4, 4), (ranks.world_size + 1) / 2)
    return torch.equal(gradient.full_tensor(), expected)


def _shared_sum(own: torch.Tensor, total: torch.Tensor, ranks: Ranks) -> bool:
    peers = Peers.join(ranks.rank, gather)
    views = [memory.tensor(0, (_NUMEL,), torch.float32) for memory in peers.share(own.nbytes)]
    views[peers.index].copy_(own)
    peers.barrier()
    found = torch.empty(_NUMEL)
    add_sum(found, views, first=True)
    peers.barrier()
    peers.close()
    return torch.equal(found, total)


if __name__ == "__main__":
    main()
