"""What leaves a rank's memory because it does not fit, and what a GPU keeps whole because it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from aliquot.distributed.topology import RankLayout
from aliquot.engines.state_placement import Counts, OnDisk, Unsharded
from aliquot.models.model_shape import ModelShape, Shape, numel, padded_share
from aliquot.offload.windows import SMALLEST
from aliquot.planner.fit import UNCERTAINTY

Kind = Literal["states", "gradients"]

MARGIN = UNCERTAINTY  # of the limit stays free


def spilled(shape: ModelShape, layout: RankLayout, streams: bool, too_much: Callable[[OnDisk], float]) -> OnDisk:
    """The least that makes `too_much`, the bytes by which a rank holds more than it may, 0 or less; or all there is.

    `streams`: whole layers may be read for each use, as far as engine host does that. Large weights first: then few
    have their states on disk, and windows are long.
    """
    large = (each for each in shape.alike if padded_share(each, layout.world_size) >= SMALLEST)
    shapes = sorted(large, key=numel, reverse=True)
    chosen = OnDisk()
    if too_much(chosen) <= 0:
        return chosen
    # The look-up's gradient sums stay in memory.
    sums = {each: shape.alike[each] - (each == shape.embedding) for each in shapes}
    of_layers = dict.fromkeys(each for kind in shape.kinds for each in kind.frozen)
    frozen = tuple(each for each in of_layers if padded_share(each, layout.world_size) >= SMALLEST)
    most = OnDisk(
        tuple((each, shape.alike[each]) for each in shapes),
        tuple((each, count) for each, count in sums.items() if count),
        shape.layers if streams else 0,
        frozen if streams else (),
    )
    if too_much(most) > 0:
        return most
    wanted: list[tuple[Kind, Shape, int]] = [("states", each, shape.alike[each]) for each in shapes]
    wanted += [("gradients", each, count) for each, count in sums.items()]
    for kind, each, count in wanted:
        some = partial(_with_weights, chosen, kind, each)
        if too_much(some(count)) <= 0:
            return _fewest(some, count, too_much)
        chosen = some(count)
    return _fewest(
        lambda count: replace(chosen, layers=count, frozen=most.frozen if count else ()), most.layers, too_much
    )


def _fewest(with_count: Callable[[int], OnDisk], most: int, too_much: Callable[[OnDisk], float]) -> OnDisk:
    """With as little as it takes, by bisection; `most` is enough."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if too_much(with_count(middle)) <= 0:
            high = middle
        else:
            low = middle + 1
    return with_count(high)


def _with_weights(chosen: OnDisk, kind: Kind, each: Shape, count: int) -> OnDisk:
    counts: Counts = (*getattr(chosen, kind), (each, count)) if count else getattr(chosen, kind)
    return replace(chosen, states=counts) if kind == "states" else replace(chosen, gradients=counts)


def most_unsharded(micro_batches: int, fits: Callable[[Unsharded], bool]) -> Unsharded:
    """The most that fits, of a rank with so many micro-batches a step.

    Weights first: a byte of them that is kept saves (2 x micro-batches - 1) bytes of gathering, a byte of gradients
    micro-batches - 1 of reducing.
    """
    several = micro_batches > 1
    choices = [Unsharded(True, several), Unsharded(True, False), Unsharded(False, several)]
    return next((each for each in choices if fits(each)), Unsharded())
