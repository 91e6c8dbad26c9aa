"""Schedules against transformers' own, step by step over whole runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from aliquot.config.train_section import REFUSED, SETTINGS, TrainSection
from aliquot.core.errors import ConfigError
from aliquot.optim.schedule import Schedule, warmup

PEAK = 0.5
RATIOS = st.floats(0, 1)
SHAPES = st.sampled_from(["linear", "cosine", "1-sqrt"])
CYCLES = st.floats(0.1, 4)
ONE_MINIMUM = st.one_of(
    st.fixed_dictionaries({"min_lr": st.floats(0, PEAK)}, optional={"num_cycles": CYCLES}),
    st.fixed_dictionaries({"min_lr_rate": RATIOS}, optional={"num_cycles": CYCLES}),
)
KWARGS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "linear": st.just({}),
    "cosine": st.fixed_dictionaries({}, optional={"num_cycles": CYCLES}),
    "cosine_with_restarts": st.fixed_dictionaries({}, optional={"num_cycles": st.integers(1, 7)}),
    "polynomial": st.fixed_dictionaries(
        {}, optional={"lr_end": st.floats(0, 0.9 * PEAK), "power": st.floats(0.1, 4)}
    ),
    "constant": st.just({}),
    "constant_with_warmup": st.just({}),
    "inverse_sqrt": st.fixed_dictionaries({}, optional={"timescale": st.integers(1, 100)}),
    "cosine_with_min_lr": ONE_MINIMUM,
    "cosine_warmup_with_min_lr": st.tuples(
        ONE_MINIMUM, st.fixed_dictionaries({}, optional={"warmup_lr_rate": RATIOS})
    ).map(lambda both: {**both[0], **both[1]}),
    "warmup_stable_decay": st.fixed_dictionaries(
        {"num_decay_steps": st.integers(0, 20)},
        optional={
            "num_stable_steps": st.integers(0, 20), "warmup_type": SHAPES, "decay_type": SHAPES,
            "min_lr_ratio": RATIOS, "num_cycles": CYCLES,
        },
    ),
}  # fmt: skip


def ours(kind: str, total_steps: int, warmup_steps: int, kwargs: dict[str, Any]) -> Schedule:
    train = TrainSection(
        lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs, learning_rate=PEAK, warmup_steps=warmup_steps
    )
    return Schedule.of(train, total_steps)


def theirs(kind: str, total_steps: int, warmup_steps: int, kwargs: dict[str, Any]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(kind, optimizer, warmup_steps, total_steps, kwargs)
    rates = []
    for step in range(total_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        if step + 1 < total_steps:
            scheduler.step()
    return rates


def test_all_that_transformers_has_are_there_or_refused() -> None:
    assert {kind.value for kind in SchedulerType} == SETTINGS.keys() | REFUSED.keys()


@pytest.mark.parametrize("kind", KWARGS)
@given(data=st.data(), total_steps=st.integers(1, 40), warmup_steps=st.integers(0, 50))
def test_equals_transformers_over_a_whole_run(
    kind: str, data: st.DataObject, total_steps: int, warmup_steps: int
) -> None:
    kwargs = data.draw(KWARGS[kind])
    needed = warmup_steps + kwargs.get("num_decay_steps", 0)
    if kind == "warmup_stable_decay" and "num_stable_steps" not in kwargs and needed > total_steps:
        with pytest.raises(ConfigError, match=f"needs {needed} steps, and the run has {total_steps}"):
            ours(kind, total_steps, warmup_steps, kwargs)
        return
    schedule = ours(kind, total_steps, warmup_steps, kwargs)
    # `constant` of transformers has no warm-up, ours has the one that is asked for.
    expected = theirs("constant_with_warmup" if kind == "constant" else kind, total_steps, warmup_steps, kwargs)
    assert [schedule.rate(step) for step in range(total_steps)] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_warmup_steps_win_over_the_ratio() -> None:
    assert (warmup(3, 0.5, 100), warmup(None, 0.031, 100)) == (3, 4)
