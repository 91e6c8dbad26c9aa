"""Learning-rate schedules with the names and formulas of transformers: functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from aliquot.config import train_section
from aliquot.config.train_section import TrainSection
from aliquot.core.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """The learning rate rises over `warmup_steps` of `total_steps` to `peak`, then follows `settings`.

    Names and formulas are those of transformers.get_scheduler. The first of several warm-up steps has rate 0, unless
    the settings say otherwise.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    settings: train_section.Constant

    @classmethod
    def of(cls, train: TrainSection, total_steps: int) -> Self:
        """Read the schedule from the configuration. Raises ConfigError if its phases are longer than the run."""
        settings = train_section.validate_schedule(
            train.lr_scheduler_type, train.lr_scheduler_kwargs, train.learning_rate
        )
        warmup_steps = warmup(train.warmup_steps, train.warmup_ratio, total_steps)
        if isinstance(settings, train_section.WarmupStableDecay) and settings.num_stable_steps is None:
            phases = warmup_steps + settings.num_decay_steps
            if phases > total_steps:
                raise ConfigError(
                    f"train.lr_scheduler_type: warmup_stable_decay with {warmup_steps} steps of warm-up and"
                    f" num_decay_steps {settings.num_decay_steps} needs {phases} steps, and the run has {total_steps}"
                )
        return cls(train.learning_rate, warmup_steps, total_steps, settings)

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * _rising(self.settings, step, self.warmup_steps)
        return self.peak * _AFTER_WARMUP[type(self.settings)](self, self.settings, step)

    def progress(self, step: int) -> float:
        """Return the part of the steps after the warm-up that is over; 1 is the end of the run."""
        return (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)


def warmup(steps: int | None, ratio: float, total_steps: int) -> int:
    """Return the number of warm-up steps: `steps`, or if None the part `ratio` of all steps, rounded up."""
    return math.ceil(ratio * total_steps) if steps is None else steps


def _rising(settings: train_section.Constant, step: int, steps: int) -> float:
    """Return the rate of a warm-up step as a part of the peak."""
    done = step / steps
    if isinstance(settings, train_section.CosineWarmupWithMinLr):  # reaches the peak in the last step
        lowest = settings.warmup_lr_rate
        return (step + 1) / steps if lowest is None else _above(lowest, step / max(1, steps - 1))
    if isinstance(settings, train_section.WarmupStableDecay):
        shapes = {"linear": done, "cosine": 1.0 - _waves(0.5, done), "1-sqrt": 1.0 - math.sqrt(1.0 - done)}
        return _above(settings.min_lr_ratio, shapes[settings.warmup_type])
    return done


# Each of these functions returns the rate of a step after the warm-up as a part of the peak.


def _constant(schedule: Schedule, settings: train_section.Constant, step: int) -> float:
    return 1.0


def _linear(schedule: Schedule, settings: train_section.Linear, step: int) -> float:
    return max(0.0, 1.0 - schedule.progress(step))


def _cosine(schedule: Schedule, settings: train_section.Cosine, step: int) -> float:
    return max(0.0, _waves(settings.num_cycles, schedule.progress(step)))


def _cosine_with_restarts(schedule: Schedule, settings: train_section.CosineWithRestarts, step: int) -> float:
    progress = schedule.progress(step)
    return 0.0 if progress >= 1.0 else max(0.0, _waves(0.5, settings.num_cycles * progress % 1.0))


def _cosine_with_min_lr(schedule: Schedule, settings: train_section.CosineWithMinLr, step: int) -> float:
    # The variant with its own warm-up reaches its end in the last step, the other one in the step after that.
    step += isinstance(settings, train_section.CosineWarmupWithMinLr)
    return max(0.0, _above(settings.lowest(schedule.peak), _waves(settings.num_cycles, schedule.progress(step))))


def _polynomial(schedule: Schedule, settings: train_section.Polynomial, step: int) -> float:
    return _above(settings.lr_end / schedule.peak, (1.0 - schedule.progress(step)) ** settings.power)


def _inverse_sqrt(schedule: Schedule, settings: train_section.InverseSqrt, step: int) -> float:
    timescale = settings.timescale or schedule.warmup_steps or 10_000
    return 1.0 / math.sqrt((step - schedule.warmup_steps + timescale) / timescale)


def _warmup_stable_decay(schedule: Schedule, settings: train_section.WarmupStableDecay, step: int) -> float:
    decay_steps, stable_steps = settings.num_decay_steps, settings.num_stable_steps
    if stable_steps is None:
        stable_steps = schedule.total_steps - schedule.warmup_steps - decay_steps
    decaying = step - schedule.warmup_steps - stable_steps
    if decaying < 0:
        return 1.0
    if decaying >= decay_steps:
        return settings.min_lr_ratio
    done = decaying / decay_steps
    shapes = {"linear": 1.0 - done, "cosine": _waves(settings.num_cycles, done), "1-sqrt": 1.0 - math.sqrt(done)}
    return max(0.0, _above(settings.min_lr_ratio, shapes[settings.decay_type]))


_AFTER_WARMUP: Mapping[type[train_section.Constant], Callable[[Schedule, Any, int], float]] = {
    train_section.Constant: _constant,
    train_section.Linear: _linear,
    train_section.Cosine: _cosine,
    train_section.CosineWithRestarts: _cosine_with_restarts,
    train_section.CosineWithMinLr: _cosine_with_min_lr,
    train_section.CosineWarmupWithMinLr: _cosine_with_min_lr,
    train_section.Polynomial: _polynomial,
    train_section.InverseSqrt: _inverse_sqrt,
    train_section.WarmupStableDecay: _warmup_stable_decay,
}


def _waves(cycles: float, progress: float) -> float:
    """Return a cosine that is 1 at progress 0; half a cycle ends at 0."""
    return 0.5 * (1.0 + math.cos(2.0 * math.pi * cycles * progress))


def _above(lowest: float, factor: float) -> float:
    """Interpolate from `lowest` (factor 0) to the peak (factor 1)."""
    return lowest + (1.0 - lowest) * factor
