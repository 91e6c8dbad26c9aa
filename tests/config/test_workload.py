"""Which rows of the data a plan looks at: the one that costs most memory, and one that takes as long as others."""

from __future__ import annotations

from itertools import pairwise

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


def test_what_keeps_most_memory_does_not_take_longest() -> None:
    """Of a long document most probabilities are computed again: documents of 512 tokens keep more, and a row of one
    long document multiplies three times as many."""
    found = workload(LONG, MIDDLING, SHORT, SHORT)
    assert lengths(found.heaviest(1)) == MIDDLING
    # Scores of these rows, in thousands: 2,228, 655, 131, 131; their mean is 786.
    assert lengths(found.typical(1)) == MIDDLING
    mostly_long = workload(LONG, LONG, LONG, MIDDLING)
    assert lengths(mostly_long.heaviest(1)) == MIDDLING and lengths(mostly_long.typical(1)) == LONG


def test_rows_of_documents_that_are_not_packed_are_typical_by_their_length() -> None:
    found = workload([10], [11], [12], [500])
    assert lengths(found.heaviest(1)) == [500]
    assert sum(lengths(found.typical(1))) == 12  # between that and 500 there is none
    assert found.row_tokens == 533 / 4  # so its work counts eleven times: plan/planned_model.py


@given(st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 5))
def test_a_row_of_several_sequences_is_of_samples_that_follow_each_other(samples: list[list[int]], count: int) -> None:
    found = workload(*samples)
    rows = [(samples * count)[start : start + count] for start in range(len(samples) * count)]
    windows = [[length for sample in row for length in sample] for row in rows if len(row) == count]
    assert lengths(found.typical(count)) in windows and lengths(found.heaviest(count)) in windows
