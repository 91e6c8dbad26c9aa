"""How fast an owner sums gradients and updates weights: with the engine's own code, for 2 ranks and for 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Fastest = Callable[[Callable[[], Any]], float]  # seconds of one call

_SOURCES = (2, 4)  # ranks whose gradients are summed
_NUMEL = 1 << 20  # of a sum, and of what is updated at a time
_ROW_NUMEL = 1024


def measure_updates(fastest: Fastest, room: Tensor) -> dict[str, Any]:
    """Elements a second. `room`: uint8, memory to sum and update in, larger than a cache."""

    def sum_rate(count: int, kept: str) -> float:
        add, numel = _sum(room, count, kept)
        return numel / fastest(add)

    return {
        "sums": {kept: [[float(count), sum_rate(count, kept)] for count in _SOURCES] for kept in ("fp32", "bf16")},
        "updates": {states: _NUMEL / fastest(_update(room, states)) for states in ("fp32", "bf16", "int8")},
    }


def _sum(room: Tensor, count: int, kept: str) -> tuple[Callable[[], None], int]:
    """Adds the gradients of `count` ranks to the next of several sums; and the elements of one."""
    import torch

    from aliquot.distributed.collectives.reduce import RoundingNoise, add_sum, add_sum_rounded

    values = room.view(torch.bfloat16)
    values.fill_(1)
    numel = min(_NUMEL, len(values) // (count + 2))
    sets = values[: len(values) // ((count + 2) * numel) * (count + 2) * numel].view(-1, count + 2, numel)
    turn: Iterator[Tensor] = cycle(sets)
    noise = RoundingNoise(0, 1, 0)

    def add() -> None:
        one = next(turn)
        own, sources = one[:2].view(-1), list(one[2:])
        if kept == "fp32":
            add_sum(own.view(torch.float32), sources, first=False)
        else:
            add_sum_rounded(own[:numel], sources, False, noise)

    return add, numel


def _update(room: Tensor, states: Any) -> Callable[[], None]:
    """Of the next of several shards whose masters are split, not compiled."""
    import torch

    from aliquot.optim.adamw import BlockedAdamW, FlatShard
    from aliquot.optim.master_weights import SplitWeights
    from aliquot.optim.moments import moment
    from aliquot.optim.sizes import moment_bytes, update_block

    of_gradients = torch.float32 if states == "fp32" else torch.bfloat16
    of_moment = moment_bytes(states, _NUMEL, _ROW_NUMEL)
    sizes = [2 * _NUMEL, 2 * _NUMEL, of_gradients.itemsize * _NUMEL, of_moment, of_moment]
    shards = []
    for start in range(0, max(1, len(room) - sum(sizes)), sum(sizes)):
        pieces = room[start : start + sum(sizes)]
        pieces = torch.empty(sum(sizes), dtype=torch.uint8) if len(pieces) < sum(sizes) else pieces
        pieces.view(torch.bfloat16).fill_(1)
        high, low, gradient, *of_moments = torch.split(pieces, sizes)
        weights = SplitWeights(high.view(torch.bfloat16), low=low)
        first, second = (
            moment(states, _NUMEL, _ROW_NUMEL, squared, memory)
            for squared, memory in zip((False, True), of_moments, strict=True)
        )
        shards.append(FlatShard(weights, first, second, gradient.view(of_gradients), decays=True, start=0))
    longest = update_block(states, _ROW_NUMEL)
    optimizer = BlockedAdamW((0.9, 0.999), 1e-8, 0.1, frugal=states != "fp32", longest=longest)
    turn = cycle(shards)
    return lambda: optimizer.step([next(turn)], 1e-5, 1.0, 1.0)
