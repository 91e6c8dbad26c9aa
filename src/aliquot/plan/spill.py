"""What goes to disk: what does not fit into memory, in the order of how rarely it is touched, and no more than that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from aliquot.config.on_disk import Counts, OnDisk
from aliquot.models.model_shape import ModelShape, Shape, numel, padded_share
from aliquot.offload.windows import SMALLEST

MARGIN = 0.05  # of the limit stays free: a plan of memory may be so much too low


def spilled(shape: ModelShape, world_size: int, too_much: Callable[[OnDisk], float]) -> OnDisk:
    """The least that makes `too_much`, the bytes by which a rank holds more than it may, 0 or less; or all there is.

    Large weights first: then few have their states on disk, and windows are long.
    """
    shapes = sorted((each for each in shape.alike if padded_share(each, world_size) >= SMALLEST), key=numel)[::-1]
    chosen = OnDisk()
    kinds: tuple[Literal["states", "gradients"], ...] = ("states", "gradients")
    for kind in kinds:
        for each in shapes:
            if too_much(chosen) <= 0:
                return chosen
            # The look-up's gradient sums stay in memory.
            most = shape.alike[each] - (kind == "gradients" and each == shape.embedding)
            chosen = _with_fewest(chosen, kind, each, most, too_much)
    return chosen


def _with_fewest(
    chosen: OnDisk,
    kind: Literal["states", "gradients"],
    each: Shape,
    most: int,
    too_much: Callable[[OnDisk], float],
) -> OnDisk:
    """With as few weights of that shape as it takes, by bisection; `most` if even they are not enough."""

    def with_count(count: int) -> OnDisk:
        counts: Counts = (*getattr(chosen, kind), (each, count)) if count else getattr(chosen, kind)
        return replace(chosen, states=counts) if kind == "states" else replace(chosen, gradients=counts)

    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if too_much(with_count(middle)) <= 0:
            high = middle
        else:
            low = middle + 1
    return with_count(high)
