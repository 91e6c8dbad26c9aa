"""How many rows the products of an expert have: few different numbers, for oneDNN keeps a kernel of each. No torch."""

from __future__ import annotations

_LEAST = 8  # rows
PRODUCTS = 6  # of an expert, different in shape or order: two forward, four backward


def filled_up(count: int) -> int:
    """The next of eight numbers between two powers of two: 200 rows are 208, 1,000 are 1,024."""
    step = max(_LEAST, (1 << (count - 1).bit_length() - 1) // 8 if count > 1 else 0)
    return -(-count // step) * step


def row_counts(tokens: int) -> int:
    """How many different numbers of rows an expert can have that 1 to all of `tokens` choose."""
    found, count = 0, 1
    while count <= tokens:
        found, count = found + 1, filled_up(count) + 1
    return found
