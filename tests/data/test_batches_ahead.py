"""Batches that are laid out ahead are those that would be laid out when they are needed."""

from __future__ import annotations

import threading

import pytest

from aliquot.data.batches import Batches, StepBatch
from aliquot.data.batches_ahead import BatchesAhead
from tests.data.stores import numbered
from tests.data.test_batches import batches, facts


class Noted(Batches):
    """Tells which steps have been laid out."""

    def __init__(self, made: Batches, fails_at: int | None = None) -> None:
        vars(self).update(vars(made))
        self.laid_out = [threading.Event() for _ in range(10)]
        self.fails_at = fails_at

    def step_batch(self, step: int, rank: int, world_size: int) -> StepBatch:
        if step == self.fails_at:
            raise OSError(5, "Input/output error")
        batch = super().step_batch(step, rank, world_size)
        self.laid_out[step].set()
        return batch


def test_the_same_batches_one_step_ahead() -> None:
    made = Noted(batches(numbered([3, 17, 2, 9, 40, 5, 5, 8, 12, 31])))
    with BatchesAhead(made, 1, 2, first=3, stop=7) as ahead:
        for step in range(3, 7):
            taken, expected = ahead.take(step), batches(made.sources[0].store).step_batch(step, 1, 2)
            assert [micro and facts(micro) for micro in taken.micro_batches] == [
                micro and facts(micro) for micro in expected.micro_batches
            ]
            assert (taken.predicted, taken.tokens, taken.epoch) == (expected.predicted, expected.tokens, expected.epoch)
            if step < 6:  # nobody has asked for it yet
                assert made.laid_out[step + 1].wait(30)
    assert not made.laid_out[7].is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aliquot-batches")]


def test_what_fails_ahead_is_raised_where_it_is_needed() -> None:
    with BatchesAhead(Noted(batches(numbered([16] * 20)), fails_at=1), 0, 1, first=0, stop=3) as ahead:
        ahead.take(0)
        with pytest.raises(OSError, match="Input/output"):
            ahead.take(1)
