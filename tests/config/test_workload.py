"""Which rows of the data a plan looks at: the one that costs most memory, and those whose mean takes as long as all."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.workload import Workload

LENGTH = 2048


def workload(*samples: list[int]) -> Workload:
    """`samples`: lengths of the documents of each."""
    edges = tuple((0, *(sum(each[: end + 1]) for end in range(len(each)))) for each in samples)
    tokens = sum(map(sum, samples)) / len(samples)
    return Workload(edges, tokens, tokens, None, 0, "test")


LONG, MIDDLING, SHORT = [LENGTH], [512] * 4, [64] * 32


def lengths(edges: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in pairwise(edges)]


def tokens_and_pairs(edges: tuple[int, ...]) -> float:
    """As attention/tiled_attention.py has it, counted pair by pair of blocks of 128."""
    of_blocks = sum(128 * (first + 128) for each in lengths(edges) if each > 256 for first in range(0, each - 127, 128))
    return edges[-1] + (of_blocks + sum(each * max(64, each) for each in lengths(edges) if each <= 256)) / 1000


def test_what_keeps_most_memory_does_not_take_longest() -> None:
    """Of a long document most probabilities are computed again: documents of 512 tokens keep more, and a row of one
    long document multiplies three times as many."""
    found = workload(LONG, LONG, MIDDLING, SHORT)
    assert lengths(found.heaviest(1)) == MIDDLING
    (share, heaviest), (rest, other) = found.mean(1)
    assert (lengths(heaviest), lengths(other)) == (MIDDLING, LONG)
    assert share * tokens_and_pairs(heaviest) + rest * tokens_and_pairs(other) == pytest.approx(
        sum(map(tokens_and_pairs, found.samples)) / 4
    )


def test_of_rows_that_are_not_packed_the_longest_is_heaviest() -> None:
    found = workload([10], [11], [12], [500], [900])
    assert lengths(found.heaviest(1)) == [900]
    (share, heaviest), (rest, other) = found.mean(1)
    assert (lengths(heaviest), lengths(other)) == ([900], [12])  # the mean is between 12 and 500
    assert share + rest == 1 and share * 900 + rest * 12 == pytest.approx(found.row_tokens, rel=0.1)


def test_the_only_row_is_the_mean() -> None:
    found = workload(MIDDLING)
    assert found.mean(1) == ((1.0, found.heaviest(1)),)
    assert found.mean(3) == ((1.0, found.heaviest(3)),) and lengths(found.heaviest(3)) == 3 * MIDDLING


@given(st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 5))
def test_rows_are_of_samples_that_follow_each_other(samples: list[list[int]], count: int) -> None:
    found = workload(*samples)
    rows = [(samples * count)[start : start + count] for start in range(len(samples) * count)]
    windows = [[length for sample in row for length in sample] for row in rows if len(row) == count]
    mean = found.mean(count)
    assert all(lengths(edges) in windows for edges in (found.heaviest(count), *(edges for _, edges in mean)))
    assert sum(share for share, _ in mean) == pytest.approx(1) and all(share > 0 for share, _ in mean)
    if len(mean) == 2:  # else all rows may lie on one side of the mean, or one on it
        assert sum(share * tokens_and_pairs(edges) for share, edges in mean) == pytest.approx(
            count * sum(map(tokens_and_pairs, found.samples)) / len(samples)
        )
