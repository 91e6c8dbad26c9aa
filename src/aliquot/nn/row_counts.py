"""How many rows matrix products have: few different numbers, for oneDNN keeps a kernel of each. No torch."""

from __future__ import annotations

from collections.abc import Iterator

PRODUCTS = 6  # of an expert, different in shape or order: two forward, four backward
_LEAST = 8  # rows of an expert
_FILLER = 64
_LEAST_TOKENS = 32  # as many as an AMX tile pair has rows


def filled_up(count: int, least: int = _LEAST) -> int:
    """The next of eight numbers between two powers of two: 200 rows are 208, 1,000 are 1,024; multiples of `least`."""
    step = max(least, (1 << (count - 1).bit_length() - 1) // 8 if count > 1 else 0)
    return -(-count // step) * step


def row_counts(most: int, least: int = _LEAST) -> int:
    """How many different ones there are of 1 to `most`."""
    return len(list(_numbers(most, least)))


def filled_row(tokens: int, sequences: int, sequence_length: int) -> int:
    """Tokens of a micro-batch of sequences that are not packed, with those that fill it up: never more than whole
    sequences have."""
    return min(filled_up(tokens, _LEAST_TOKENS), sequences * sequence_length)


def filler(tokens: int, sequences: int, sequence_length: int) -> list[int]:
    """The lengths of the documents that fill it up: attention to short ones costs little."""
    room = filled_row(tokens, sequences, sequence_length) - tokens
    whole, rest = divmod(room, min(_FILLER, sequence_length))
    return [min(_FILLER, sequence_length)] * whole + [rest] * (rest > 0)


def row_lengths(sequences: int, sequence_length: int) -> int:
    """How many different ones of `filled_row` there are of 1 to so many sequences."""
    wholes = {count * sequence_length for count in range(1, sequences + 1)}
    return len(wholes | {each for each in _numbers(max(wholes), _LEAST_TOKENS) if each <= max(wholes)})


def _numbers(most: int, least: int) -> Iterator[int]:
    count = 1
    while count <= most:
        found = filled_up(count, least)
        yield found
        count = found + 1
