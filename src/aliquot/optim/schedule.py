"""Learning-rate schedules, as transformers defines them for the same names."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int, total_steps: int, warmup_steps: int, peak: float, kind: Literal["linear", "cosine", "constant"]
) -> float:
    """The rate of optimizer step `step` (0-based): linear warm-up from 0, then to 0 at `total_steps`, or constant.

    The formulas are those of transformers.optimization (get_scheduler): the first of several warm-up steps has rate 0.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if kind == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if kind == "linear":
        return peak * max(0.0, 1.0 - progress)
    return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def warmup(steps: int | None, ratio: float, total_steps: int) -> int:
    """Warm-up steps: `steps` if given, else that part of all steps, rounded up."""
    return math.ceil(ratio * total_steps) if steps is None else steps
