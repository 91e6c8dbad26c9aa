"""Limit and count the shapes of matrix products, because oneDNN caches a compiled kernel for each shape.

The number of rows of a product is padded to one of a few values. The planner counts the shapes, so this module needs no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator

# Products over all tokens, and over the tokens of an expert
PRODUCTS = 6  # matrix products of an expert that differ in shape or order: two forward, four backward
_MIN_ROWS = 8  # the fewest rows of an expert's product
_FILLER_TOKENS = 64  # tokens of a padding document
_MIN_TOKENS = 32  # the rows of a pair of AMX tiles

# Tiles of attention on CPU (tiles.py)
NARROWEST = 64  # width of the narrowest bin, which several documents share
STEP = 32  # wider bins are multiples of this, and hold one document or a long and a short one
LONGEST_BINNED = 256  # longer documents are cut into blocks of queries
QUERY_BLOCK = 128
_SAVED_KEYS = 128  # mean number of a token's probabilities saved for the backward pass, which recomputes the others
BATCHES = (16, 4, 1)  # batch sizes: numbers of bins of one width that are multiplied at once
TILE_PRODUCTS = 3  # products of a tile that differ in shape or order: scores, outputs, gradients of keys and values

# Logits of the head loss
HOST_LOGITS_BYTES = 256 << 20
LOGITS_ROW_COUNTS = 8  # different numbers of rows for micro-batches of one size
_PART_OF_GPU = 16  # 5 GiB on an H100; 8,192 tokens of a vocabulary of 128,256 in bf16 need 2 GiB


def filled_up(count: int, least: int = _MIN_ROWS) -> int:
    """Return `count` rounded up to a multiple of `least` and to one of eight steps between powers of two.

    For example, 200 becomes 208, and 1,000 becomes 1,024.
    """
    step = max(least, (1 << (count - 1).bit_length() - 1) // 8 if count > 1 else 0)
    return -(-count // step) * step


def row_counts(most: int) -> int:
    """Return the number of different results of `filled_up` for 1 to `most` rows."""
    return len(list(_numbers(most, _MIN_ROWS)))


def filled_row(tokens: int, sequences: int, sequence_length: int) -> int:
    """Return the number of tokens of unpacked sequences after padding, at most the number in full sequences."""
    return min(filled_up(tokens, _MIN_TOKENS), sequences * sequence_length)


def filler(tokens: int, sequences: int, sequence_length: int) -> list[int]:
    """Return the lengths of the padding documents, which are short because short documents need little attention."""
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


def saved_numel(tokens: int) -> int:
    """Return how many attention probabilities a head saves for a row of tokens: at least those of its widest bin."""
    widest = min(LONGEST_BINNED, max(NARROWEST, -(-tokens // STEP) * STEP))
    return max(_SAVED_KEYS * tokens, widest**2)


def tile_shapes(tokens: int, longest: int, window: int | None) -> int:
    """Return the most tile shapes that rows of `tokens` may have, for documents of at most `longest` tokens."""
    bins = sum(width == NARROWEST or width - STEP < longest for width, _ in binned(tokens))
    if longest <= LONGEST_BINNED:
        return bins
    first_keys = {
        first + QUERY_BLOCK - (0 if window is None else max(0, first - window + 1))
        for first in range(0, longest, QUERY_BLOCK)
    }
    return bins + len(first_keys)


def binned(tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (width, batch size) of all batches of bins that a row of `tokens` may need."""
    for width in range(NARROWEST, LONGEST_BINNED + 1, STEP):
        for count in BATCHES:
            # A wider bin exists only if a document does not fit into a narrower bin.
            if count * (width - STEP) < tokens:
                yield width, count


def logits_room(gpu_memory_bytes: int | None) -> int:
    """Return the most bytes of logits at once. `gpu_memory_bytes`: memory of the GPU; None on a CPU."""
    return HOST_LOGITS_BYTES if gpu_memory_bytes is None else max(HOST_LOGITS_BYTES, gpu_memory_bytes // _PART_OF_GPU)
