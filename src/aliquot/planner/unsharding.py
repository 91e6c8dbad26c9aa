"""Which of weights and gradients GPUs keep whole within a step: the more, the less is gathered and reduced."""

from __future__ import annotations

from collections.abc import Callable

from aliquot.engines.state_placement import Unsharded


def most_unsharded(micro_batches: int, fits: Callable[[Unsharded], bool]) -> Unsharded:
    """The most that fits, of a rank with so many micro-batches a step.

    Weights first: a byte of them that is kept saves (2 x micro-batches - 1) bytes of gathering, a byte of gradients
    micro-batches - 1 of reducing.
    """
    several = micro_batches > 1
    choices = [Unsharded(True, several), Unsharded(True, False), Unsharded(False, several)]
    return next((each for each in choices if fits(each)), Unsharded())
