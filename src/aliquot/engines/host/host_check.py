"""What the host engine tries out before it trusts this machine with a run: sums, the wire, and what owners publish."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.json_values import gather
from aliquot.distributed.collectives.reduce import add_sum
from aliquot.distributed.collectives.ring import Piece, Ring
from aliquot.distributed.collectives.wire import TensorSums

_NUMEL = 1000


def check_sums(hosts: Hosts, ring: Ring) -> None:
    """Known numbers through the ring and over the wire. Collective. Raises TrainingError."""
    ranks = hosts.peers.ranks
    total = torch.zeros(_NUMEL)
    piece = ring.stage(4 * _NUMEL)
    ring.own(piece, torch.float32, (_NUMEL,)).fill_(ranks[hosts.peers.index] + 1)

    def read(piece: Piece) -> None:
        views = [ring.view(piece, member, torch.float32, 0, (_NUMEL,)) for member in range(hosts.peers.size)]
        add_sum(total, views, first=True)

    ring.publish(piece, read)
    ring.drain()
    _expect("the ranks of this host", total, sum(rank + 1 for rank in ranks))
    if hosts.wire is not None:
        counterparts = [of_host[hosts.peers.index] for of_host in hosts.table]
        parts = [[torch.full((_NUMEL,), float(counterparts[hosts.own] + 1))] for _ in hosts.table]
        hosts.wire.reduce_scatter(TensorSums(parts, torch.float32), ahead=1)
        _expect("the hosts", parts[hosts.own][0], sum(rank + 1 for rank in counterparts))


def check_published(own: Sequence[tuple[int, int]], first_of: Sequence[Tensor]) -> None:
    """Check that every rank reads what each owner has published. Collective. Raises TrainingError.

    `own`: for each non-empty part of this rank the weight's index and the element at which it begins; `first_of`: the
    weights, flat, as this rank sees them.
    """
    told = gather([[index, start, float(first_of[index][start])] for index, start in own])
    for rank, parts in enumerate(told):
        for index, start, value in parts:
            seen = float(first_of[index][start])
            if seen != value and not math.isnan(value):  # a diverged weight is read as it was published
                raise SelfTestError(f"rank {rank} published {value} and this rank reads {seen}: broken shared memory?")


def _expect(who: str, total: Tensor, expected: int) -> None:
    if not bool((total == expected).all()):
        raise SelfTestError(f"a sum over {who} gave {total[0].item()} instead of {expected}: broken torch or memory?")
