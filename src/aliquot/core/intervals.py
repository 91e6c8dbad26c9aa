"""What is done every so many steps (0: never between them), and mostly after the last."""

from __future__ import annotations

import math


def is_due(every: int, done: int) -> bool:
    """Between steps, `done` of which are done."""
    return every > 0 and done % every == 0


def times_due(every: int, steps: int, last: bool = True) -> int:
    """In a whole run; `last`: after the last step whatever `every` is."""
    before = steps // every if every else 0
    return before + (last and before * every < steps)


def times_either_due(every: int, other: int, steps: int) -> int:
    """After how many of so many steps one or the other is due, or both."""
    both = math.lcm(every, other)  # 0 where either is
    return sum(times_due(each, steps, last=False) for each in (every, other)) - times_due(both, steps, last=False)
