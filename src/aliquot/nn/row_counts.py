"""Pad the rows of matrix products to few different numbers, because oneDNN keeps a kernel for each number.

This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

PRODUCTS = 6  # matrix products of an expert that differ in shape or order: two forward, four backward
_MIN_ROWS = 8  # of an expert
_FILLER_TOKENS = 64  # of a document of padding
_MIN_TOKENS = 32  # the rows of a pair of AMX tiles


def filled_up(count: int, least: int = _MIN_ROWS) -> int:
    """Return `count` rounded up to a multiple of `least` and to one of eight steps between powers of two.

    200 rows become 208, 1,000 become 1,024.
    """
    step = max(least, (1 << (count - 1).bit_length() - 1) // 8 if count > 1 else 0)
    return -(-count // step) * step


def row_counts(most: int, least: int = _MIN_ROWS) -> int:
    """Return the number of different results of `filled_up` for 1 to `most` rows."""
    return len(list(_numbers(most, least)))


def filled_row(tokens: int, sequences: int, sequence_length: int) -> int:
    """Return the tokens of a micro-batch of unpacked sequences with its padding: at most those of full sequences."""
    return min(filled_up(tokens, _MIN_TOKENS), sequences * sequence_length)


def filler(tokens: int, sequences: int, sequence_length: int) -> list[int]:
    """Return the lengths of the documents of padding, which are short because their attention costs little."""
    padding = filled_row(tokens, sequences, sequence_length) - tokens
    whole, rest = divmod(padding, min(_FILLER_TOKENS, sequence_length))
    return [min(_FILLER_TOKENS, sequence_length)] * whole + [rest] * (rest > 0)


def row_lengths(sequences: int, sequence_length: int) -> int:
    """Return the number of different results of `filled_row` for 1 to `sequences` sequences."""
    wholes = {count * sequence_length for count in range(1, sequences + 1)}
    return len(wholes | {number for number in _numbers(max(wholes), _MIN_TOKENS) if number <= max(wholes)})


def _numbers(most: int, least: int) -> Iterator[int]:
    count = 1
    while count <= most:
        number = filled_up(count, least)
        yield number
        count = number + 1
