"""Learning-rate schedules as functions of the step: those of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from transformers.optimization import get_scheduler

from aliquot.config.train_section import TrainSection, WarmupStableDecay, validate_schedule
from aliquot.core.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each optimizer step of a run."""

    peak: float
    factor: Callable[[int], float]  # by which the peak is multiplied in a step

    @classmethod
    def of(cls, train: TrainSection, total_steps: int) -> Self:
        """Read the schedule from the configuration. Raises ConfigError if its phases are longer than the run."""
        kind, options, peak = train.lr_scheduler_type, train.lr_scheduler_kwargs, train.learning_rate
        settings = validate_schedule(kind, options, peak)
        warmup_steps = warmup(train.warmup_steps, train.warmup_ratio, total_steps)
        if isinstance(settings, WarmupStableDecay) and settings.num_stable_steps is None:
            phases = warmup_steps + settings.num_decay_steps
            if phases > total_steps:
                raise ConfigError(
                    f"train.lr_scheduler_type: warmup_stable_decay with {warmup_steps} steps of warm-up and"
                    f" num_decay_steps {settings.num_decay_steps} needs {phases} steps, and the run has {total_steps}"
                )
        name = "constant_with_warmup" if kind == "constant" else kind  # transformers' constant has no warm-up
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)  # of which the scheduler reads the rate
        # With a number of stable steps, transformers would warn that it ignores the number of all steps.
        all_steps = None if options.get("num_stable_steps") is not None else total_steps
        return cls(peak, get_scheduler(name, optimizer, warmup_steps, all_steps, options).lr_lambdas[0])

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0."""
        return self.peak * self.factor(step)


def warmup(steps: int | None, ratio: float, total_steps: int) -> int:
    """Return the number of warm-up steps: `steps`, or if None, `ratio` times all steps, rounded up."""
    return math.ceil(ratio * total_steps) if steps is None else steps
