"""Count the steps at which saves and evaluations are due: every N steps, and mostly after the last step.

An interval of 0 means never between steps.
"""

from __future__ import annotations

import math


def is_due(interval: int, steps_done: int) -> bool:
    """Return whether work of this interval is due after `steps_done` steps."""
    return interval > 0 and steps_done % interval == 0


def times_due(interval: int, steps: int, last: bool = True) -> int:
    """Return how often work is due in a run of `steps`; `last`: also after the last step, whatever the interval."""
    count = steps // interval if interval else 0
    return count + (last and count * interval < steps)


def times_either_due(first: int, second: int, steps: int) -> int:
    """Return after how many of `steps` work of one interval or the other is due."""
    both = math.lcm(first, second)  # 0 if one interval is
    count = times_due(first, steps, last=False) + times_due(second, steps, last=False)
    return count - times_due(both, steps, last=False)
