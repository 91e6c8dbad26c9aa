"""What is done every so many steps (0: never between them), and after the last."""

from __future__ import annotations


def is_due(every: int, done: int) -> bool:
    """Between steps, `done` of which are done."""
    return every > 0 and done % every == 0


def times_due(every: int, steps: int) -> int:
    """In a whole run."""
    return -(-steps // every) if every else min(1, steps)
