"""Steps over the endless stream: each sequence once, however often a run ended and went on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.data.steps import Steps


@given(size=st.integers(1, 9), stages=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_stages_take_each_sequence_once_in_order(size: int, stages: list[int]) -> None:
    """A run that ends at one sequence after the other, each time told to go on from where it was."""
    taken: list[range] = []
    ends: tuple[int, ...] = ()
    stop = 0
    for length in stages:
        stop += length
        steps = Steps(size, stop, ends)
        before = len(taken)
        assert not steps.of(steps.until(stop))
        taken += [steps.of(step) for step in range(before, steps.until(stop))]
        assert [steps.of(step) for step in range(len(taken))] == taken, "earlier steps are what they were"
        ends = Steps(size, None, ends).going_on(len(taken), stop).ends
    assert [each.start for each in taken] == [0, *(each.stop for each in taken[:-1])] and taken[-1].stop == stop
    assert all(0 < len(each) <= size for each in taken)
    # Within a stage only the last step is short.
    short = [each.stop for each in taken if len(each) < size]
    assert set(short) <= {sum(stages[:number]) for number in range(1, len(stages) + 1)}


@given(size=st.integers(1, 9), step=st.integers(0, 50))
def test_a_run_that_ends_between_batches_goes_on_as_if_it_had_not(size: int, step: int) -> None:
    assert Steps(size).going_on(step, step * size) == Steps(size)
    assert Steps(size).of(step) == range(step * size, (step + 1) * size)


@pytest.mark.parametrize(("step", "sequence"), [(0, 1), (2, 5), (2, 11), (3, 0)])
def test_where_a_run_cannot_have_ended(step: int, sequence: int) -> None:
    with pytest.raises(ValueError, match=f"{step} steps do not end at sequence {sequence}"):
        Steps(5).going_on(step, sequence)


def test_lowering_the_end_leaves_no_step() -> None:
    steps = Steps(5, 7, (12,))
    assert (steps.until(7), [len(step) for step in map(steps.of, range(4))]) == (2, [5, 2, 0, 0])


def test_all_of_the_stream_is_covered_after_an_end() -> None:
    taken = [Steps(5, None, (7, 9)).of(step) for step in range(5)]
    assert taken == [range(5), range(5, 7), range(7, 9), range(9, 14), range(14, 19)]
    assert all(one.stop == other.start for one, other in pairwise(taken))
