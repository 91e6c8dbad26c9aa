"""Of which sizes attention's tiles on CPU are (tiles.py), and how many different ones that makes. No torch."""

from __future__ import annotations

from collections.abc import Iterator

NARROWEST = 64  # width of a bin: several documents share one
STEP = 32  # wider bins come in multiples of this and hold one document, or a long and a short one
LONGEST_BINNED = 256  # documents above are cut into blocks of queries
QUERY_BLOCK = 128
_KEPT_KEYS = 128  # probabilities of a token, on average, that are kept for the backward pass; others are computed again
BATCHES = (16, 4, 1)  # bins of one width that are multiplied at once
PRODUCTS = 3  # of a tile, different in shape or order: scores, what they weigh, and the way back to keys and values


def kept_numel(tokens: int) -> int:
    """Probabilities of a head that are kept of a row of so many tokens: at least those of its widest bin."""
    widest = min(LONGEST_BINNED, max(NARROWEST, -(-tokens // STEP) * STEP))
    return max(_KEPT_KEYS * tokens, widest**2)


def tile_shapes(tokens: int, longest: int, window: int | None) -> int:
    """At most, in rows of `tokens` with documents of at most `longest`, of which a token sees `window` back."""
    bins = sum(width == NARROWEST or width - STEP < longest for width, _ in binned(tokens))
    if longest <= LONGEST_BINNED:
        return bins
    first_keys = {
        first + QUERY_BLOCK - (0 if window is None else max(0, first - window + 1))
        for first in range(0, longest, QUERY_BLOCK)
    }
    return bins + len(first_keys)


def binned(tokens: int) -> Iterator[tuple[int, int]]:
    """(width, how many at once) of all bins that there can be in rows of `tokens`."""
    for width in range(NARROWEST, LONGEST_BINNED + 1, STEP):
        for count in BATCHES:
            # A bin of more than the narrowest holds a document that does not fit into a narrower one.
            if count * (width - STEP) < tokens:
                yield width, count
