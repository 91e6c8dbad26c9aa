"""Compute when saves and evaluations are due: every N steps, and usually also after the last step.

With an interval of 0, nothing is due before the last step.
"""

from __future__ import annotations

import math


def is_due(interval: int, steps_done: int) -> bool:
    """Return whether work that is due every `interval` steps is due after `steps_done` steps."""
    return interval > 0 and steps_done % interval == 0


def times_due(interval: int, steps: int, last: bool = True) -> int:
    """Return how often work is due in a run of `steps` steps. With `last`, work is due after the last step as well."""
    count = steps // interval if interval else 0
    return count + (last and count * interval < steps)


def times_either_due(first: int, second: int, steps: int) -> int:
    """Count the steps, in a run of `steps` steps, after which work of interval `first` or `second` is due."""
    both = math.lcm(first, second)  # 0 if one interval is 0
    count = times_due(first, steps, last=False) + times_due(second, steps, last=False)
    return count - times_due(both, steps, last=False)
