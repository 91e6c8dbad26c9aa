"""Learning-rate schedules as functions of the step, with the names and formulas of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

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
        kind, options = train.lr_scheduler_type, train.lr_scheduler_kwargs
        settings = train_section.validate_schedule(kind, options, train.learning_rate)
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
        is_rising = step < self.warmup_steps
        return self.peak * (_rising(self.settings, step, self.warmup_steps) if is_rising else self._after_warmup(step))

    def progress(self, step: int) -> float:
        """Return the completed fraction of the steps after the warm-up; 1 is the end of the run."""
        return (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)

    def _after_warmup(self, step: int) -> float:
        """Return the rate of a step after the warm-up as a fraction of the peak."""
        settings, progress = self.settings, self.progress(step)
        match settings:
            case train_section.Linear():
                return max(0.0, 1.0 - progress)
            case train_section.CosineWithRestarts():
                return 0.0 if progress >= 1.0 else max(0.0, _waves(0.5, settings.num_cycles * progress % 1.0))
            case train_section.CosineWithMinLr():
                # The variant with its own warm-up reaches its lowest rate in the last step, the plain one a step later.
                if isinstance(settings, train_section.CosineWarmupWithMinLr):
                    progress = self.progress(step + 1)
                return max(0.0, _above(settings.lowest(self.peak), _waves(settings.num_cycles, progress)))
            case train_section.Cosine():
                return max(0.0, _waves(settings.num_cycles, progress))
            case train_section.Polynomial():
                return _above(settings.lr_end / self.peak, (1.0 - progress) ** settings.power)
            case train_section.InverseSqrt():
                timescale = settings.timescale or self.warmup_steps or 10_000
                return 1.0 / math.sqrt((step - self.warmup_steps + timescale) / timescale)
            case train_section.WarmupStableDecay():
                return self._stable_then_decaying(settings, step)
        return 1.0

    def _stable_then_decaying(self, settings: train_section.WarmupStableDecay, step: int) -> float:
        decay_steps, stable_steps = settings.num_decay_steps, settings.num_stable_steps
        if stable_steps is None:
            stable_steps = self.total_steps - self.warmup_steps - decay_steps
        decaying = step - self.warmup_steps - stable_steps
        if decaying < 0:
            return 1.0
        if decaying >= decay_steps:
            return settings.min_lr_ratio
        done = decaying / decay_steps
        shapes = {"linear": 1.0 - done, "cosine": _waves(settings.num_cycles, done), "1-sqrt": 1.0 - math.sqrt(done)}
        return max(0.0, _above(settings.min_lr_ratio, shapes[settings.decay_type]))


def warmup(steps: int | None, ratio: float, total_steps: int) -> int:
    """Return the number of warm-up steps: `steps`, or if None, `ratio` times all steps, rounded up."""
    return math.ceil(ratio * total_steps) if steps is None else steps


def _rising(settings: train_section.Constant, step: int, steps: int) -> float:
    """Return the rate of a warm-up step as a fraction of the peak."""
    done = step / steps
    if isinstance(settings, train_section.CosineWarmupWithMinLr):  # reaches the peak in the last warm-up step
        lowest = settings.warmup_lr_rate
        return (step + 1) / steps if lowest is None else _above(lowest, step / max(1, steps - 1))
    if isinstance(settings, train_section.WarmupStableDecay):
        shapes = {"linear": done, "cosine": 1.0 - _waves(0.5, done), "1-sqrt": 1.0 - math.sqrt(1.0 - done)}
        return _above(settings.min_lr_ratio, shapes[settings.warmup_type])
    return done


def _waves(cycles: float, progress: float) -> float:
    """Return a cosine between 0 and 1 that starts at 1. With half a cycle, it ends at 0 at progress 1."""
    return 0.5 * (1.0 + math.cos(2.0 * math.pi * cycles * progress))


def _above(lowest: float, factor: float) -> float:
    """Interpolate from `lowest` (factor 0) to the peak (factor 1)."""
    return lowest + (1.0 - lowest) * factor
