"""The time that is left knows what is due beside the steps."""

from __future__ import annotations

import pytest

from aliquot.config.schema import RunConfig
from aliquot.observe.throughput import RemainingWork


def remaining(eval_steps: int, every: int, total: int, **checkpoint: object) -> RemainingWork:
    config = RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"path": "x", "eval_fraction": 0.1},
            "train": {"eval_steps": eval_steps},
            "checkpoint": {"every": every, **checkpoint},
        }
    )
    return RemainingWork(config, total, {"evaluation_s": 10.0, "save_s": 3.0, "export_s": 1.0})


def test_what_is_left_of_evaluations_and_saves() -> None:
    left = remaining(eval_steps=10, every=0, total=25)  # evaluations after 10, 20 and 25; a save after 25
    assert [left.seconds(done) for done in (0, 10, 11, 20, 21, 25)] == [34, 34, 24, 24, 14, 14]
    left.evaluation_s = 2.0  # as it took
    assert left.seconds(0) == 3 * 2 + 3 + 1
    assert remaining(eval_steps=0, every=0, total=25).seconds(24) == 14  # at the end alone
    assert remaining(eval_steps=5, every=0, total=25).seconds(24) == 14  # the last is due anyway: once


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saves_count_with_what_training_waits_for_them(asynchronous: bool) -> None:
    left = remaining(eval_steps=0, every=5, total=20, **{"async": asynchronous})
    assert left.seconds(1) == 10 + (0 if asynchronous else 9) + 3 + 1  # the last is waited for
    left.saved(4.0, 0.5)
    assert left.seconds(1) == 10 + 1.5 + 4 + 1


def test_a_run_that_ends_with_its_export_alone_does_not_wait_for_a_save() -> None:
    assert remaining(eval_steps=0, every=0, total=20, last=False).seconds(1) == 10 + 1
    assert remaining(eval_steps=0, every=5, total=20, last=False, **{"async": False}).seconds(1) == 10 + 4 * 3 + 1
    assert remaining(eval_steps=0, every=6, total=20, last=False, **{"async": False}).seconds(7) == 10 + 2 * 3 + 1


def test_without_a_plan_there_is_nothing_to_go_by_yet() -> None:
    config = RunConfig.model_validate({"model": {"config": {"model_type": "llama"}}, "data": {"path": "x"}})
    assert RemainingWork(config, 10, {}).seconds(0) == 0


def test_where_the_best_is_kept_every_evaluation_may_be_saved() -> None:
    kept = {"best": True, "last": False, "async": False}
    left = remaining(eval_steps=4, every=6, total=13, **kept)  # saves after 4, 6, 8, 12, and 13, which is evaluated
    assert [left.seconds(done) for done in (0, 5, 13)] == [4 * 10 + 5 * 3 + 1, 3 * 10 + 4 * 3 + 1, 10 + 3 + 1]
