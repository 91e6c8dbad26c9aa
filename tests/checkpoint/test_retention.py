from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.checkpoint.directories import directories, directory_of
from aliquot.checkpoint.retention import EvaluationHistory, name_best


def after(losses: list[float], threshold: float = 0.0, metric: str = "loss") -> EvaluationHistory:
    found = EvaluationHistory(metric=metric)
    for step, loss in enumerate(losses, 1):
        found = found.after(step, loss, threshold)
    return found


@given(st.lists(st.floats(0, 20), min_size=1), st.floats(0, 1))
def test_as_transformers_counts(losses: list[float], threshold: float) -> None:
    """EarlyStoppingCallback and Trainer._determine_best_metric: the first of the lowest is the best."""
    best, since = losses[0], 0
    for loss in losses[1:]:
        since = 0 if loss < best and best - loss > threshold else since + 1
        best = min(best, loss)
    found = after(losses, threshold)
    assert (found.best_value, found.best_step) == (min(losses), losses.index(min(losses)) + 1)
    accuracies = after([-loss for loss in losses], threshold, "rewards/accuracies")  # greater_is_better
    assert (accuracies.best_step, accuracies.without_improvement) == (found.best_step, found.without_improvement)
    if all(abs((one - other) - threshold) > 1e-9 for one in losses for other in losses):  # not by rounding
        assert found.without_improvement == since
    assert not found.exhausts(None)
    assert found.exhausts(found.without_improvement) and not found.exhausts(found.without_improvement + 1)


def test_failed_save_is_not_the_best_checkpoint() -> None:
    found = after([3.0, 2.0, 1.0])
    assert found.without_checkpoint(2) == found
    lost = found.without_checkpoint(3)
    assert (lost.best_step, lost.best_value, lost.last_step) == (2, 2.0, 3)
    again = lost.after(4, 1.5, 0.0)
    assert (again.best_step, again.best_value) == (4, 1.5)
    assert after([3.0]).without_checkpoint(1).after(2, 9.0, 0.0).best_step == 2


@given(st.lists(st.floats(allow_nan=True), max_size=5))
def test_the_state_of_a_checkpoint_carries_them(losses: list[float]) -> None:
    found = after([loss if loss > 0 else math.nan for loss in losses])
    told = json.loads(json.dumps({"evaluations": found.to_json()}, allow_nan=False))
    if found.best_step is not None:
        assert EvaluationHistory.from_state(told) == found
    assert EvaluationHistory.from_state({}) == EvaluationHistory()
    older = {"best_step": 3, "best_loss": 2.0, "without_improvement": 1, "last_step": 4}  # before other metrics
    assert EvaluationHistory.from_state({"evaluations": older}) == EvaluationHistory(3, 2.0, 1, 4)


@pytest.mark.parametrize("names", [[3], [3, 7], [3, None], [None]])
def test_the_link_names_the_best(tmp_path: Path, names: list[int | None]) -> None:
    for step in (3, 7):
        directory_of(tmp_path, step).mkdir()
    for best in names:
        name_best(tmp_path, best)
        name_best(tmp_path, best)
    link = tmp_path / "best"
    expected = None if names[-1] is None else directory_of(tmp_path, names[-1]).resolve()
    assert (link.resolve() if link.is_symlink() else None) == expected
    assert len(directories(tmp_path)) == 2
