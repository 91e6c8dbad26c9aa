"""Costs of checkpoints in time: the number of saves, and the wait for overlapping saves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.config.schema import RunConfig
from aliquot.planner.checkpoint_cost import SaveCounts, Saving, count_saves
from tests.planner.shapes import LLAMA, planned_config

GB = 10**9


def config_of(every: int, eval_steps: int = 0, **checkpoint: Any) -> RunConfig:
    sections = {"train": {"eval_steps": eval_steps}, "data": {"eval_fraction": 0.1}}
    return planned_config(LLAMA, **sections, checkpoint={"every": every, **checkpoint})


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 40), st.booleans(), st.booleans(), st.booleans())
def test_saves_are_counted_like_a_run_makes_them(
    every: int, eval_steps: int, steps: int, best: bool, last: bool, asynchronous: bool
) -> None:
    config = config_of(every, eval_steps, best=best, last=last, **{"async": asynchronous})
    due = {step for step in range(1, steps + 1) if (every and step % every == 0) or (best and step % eval_steps == 0)}
    if last or best:
        due.add(steps)
    found = count_saves(config, steps, Saving(1, GB, GB), 1, 1.0, 1.0)
    assert found.blocking + found.overlapped == len(due)
    assert found.blocking == (int(steps in due) if asynchronous else len(due))


def test_steps_wait_for_uncopied_parts() -> None:
    config = config_of(1, buffer_bytes=GB)
    # Of 96 GB at 0.5 GB/s, 2 may be copied by two ranks: 188 s, less the 8 s until the next update.
    assert count_saves(config, 100, Saving(1, 96 * GB, 0.5 * GB), 2, 10.0, 8.0) == SaveCounts(1, 99, 99 * 182.0)
    slow = count_saves(config_of(100, buffer_bytes=GB), 1000, Saving(1, 96 * GB, 0.5 * GB), 2, 10.0, 8.0)
    assert slow.stall_s == pytest.approx(9 * 180.0)
    assert count_saves(config_of(100, buffer_bytes=GB), 1000, Saving(1, 4 * GB, 0.5 * GB), 2, 10.0, 8.0).stall_s == 0
    nothing = count_saves(config_of(0, last=False), 100, Saving(1, GB, GB), 1, 1.0, 1.0)
    assert nothing == SaveCounts(0, 0, 0.0)
