"""Sizes of the tiles of attention on CPU (tiles.py), and the number of different shapes. Without torch."""

from __future__ import annotations

from collections.abc import Iterator

NARROWEST = 64  # width of the narrowest bin, which several documents share
STEP = 32  # wider bins are multiples of it and hold one document, or a long and a short one
LONGEST_BINNED = 256  # documents above are cut into blocks of queries
QUERY_BLOCK = 128
_SAVED_KEYS = 128  # mean number of a token's probabilities saved for backward; others are recomputed
BATCHES = (16, 4, 1)  # numbers of bins of one width that are multiplied at once
PRODUCTS = 3  # products of a tile that differ in shape or order: scores, outputs, gradients of keys and values


def saved_numel(tokens: int) -> int:
    """Return the saved probabilities of a head for a row of tokens: at least those of its widest bin."""
    widest = min(LONGEST_BINNED, max(NARROWEST, -(-tokens // STEP) * STEP))
    return max(_SAVED_KEYS * tokens, widest**2)


def tile_shapes(tokens: int, longest: int, window: int | None) -> int:
    """Return the most tile shapes in rows of `tokens` with documents of at most `longest` tokens and a window."""
    bins = sum(width == NARROWEST or width - STEP < longest for width, _ in binned(tokens))
    if longest <= LONGEST_BINNED:
        return bins
    first_keys = {
        first + QUERY_BLOCK - (0 if window is None else max(0, first - window + 1))
        for first in range(0, longest, QUERY_BLOCK)
    }
    return bins + len(first_keys)


def binned(tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (width, number of bins at once) of all possible bins in rows of `tokens`."""
    for width in range(NARROWEST, LONGEST_BINNED + 1, STEP):
        for count in BATCHES:
            # A wider bin exists only if a document does not fit into a narrower bin.
            if count * (width - STEP) < tokens:
                yield width, count
