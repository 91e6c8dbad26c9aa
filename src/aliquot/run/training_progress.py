"""The progress of training, and the loss and metrics of an optimizer step, from the reports of all ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.checkpoint.retention import EvaluationHistory
from aliquot.data.batches import StepBatch
from aliquot.nn.preference_loss import Objective
from aliquot.observe.recorder import Recorder


@dataclass
class TrainingProgress:
    """The progress of training. Steps, evaluations and saves update the progress; all ranks hold the same values."""

    step: int  # optimizer steps done, including the steps of earlier runs that this run continues
    last_step: int  # the run ends after this step; early stopping lowers it
    tokens: int
    saved_step: int  # the step of the newest checkpoint
    evaluations: EvaluationHistory
    loss: float | None = None  # of the last step
    perplexity: float | None = None  # of the last evaluation

    @property
    def is_saved(self) -> bool:
        return self.saved_step == self.step

    def end_early(self, reason: str, recorder: Recorder) -> None:
        """Make the last finished step the last step of the run."""
        if self.step < self.last_step:
            self.last_step = self.step
            recorder.stopped_early(reason)


@dataclass
class StepTotals:
    """What the calls of forward_backward of one optimizer step add up to; all ranks hold the same values."""

    loss: float = 0.0
    tokens: int = 0
    epoch: float = 0.0  # epochs completed after this step
    lengths: list[npt.NDArray[np.int32]] = field(default_factory=list)  # of documents, which decide attention's cost
    preference: dict[str, float] = field(default_factory=dict)
    source_losses: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        batch: StepBatch,
        reports: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        objective: Objective | None,
    ) -> float:
        """Add a batch, and return its loss: the sum over all ranks, over the divisor of the batch.

        Args:
            reports: of each rank, with `loss` by data source and sums of further metrics in `preference`.
            names: of the data sources.
        """
        divisor = batch.predicted or 1
        loss = math.fsum(value for report in reports for value in report["loss"]) / divisor
        self.loss += loss
        self.tokens += batch.tokens
        self.epoch = batch.epoch
        self.lengths.append(batch.lengths)
        sums = [source_sums for report in reports for source_sums in report["preference"] if source_sums]
        if objective is not None and sums:
            totals = {name: math.fsum(part[name] for part in sums) for name in sums[0]}
            self.preference |= objective.means(totals, divisor)
        sums_of_sources = zip(*(report["loss"] for report in reports), strict=True)
        self.source_losses |= {
            f"loss_{name}": math.fsum(values) / predicted
            for name, values, predicted in zip(names, sums_of_sources, batch.predicted_of, strict=False)
            if name and predicted
        }
        return loss


class LossWatch:
    """Notices a loss that explodes but stays finite: it exceeds ten times its running median for 20 steps in a row."""

    factor, steps = 10, 20

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=100)  # the losses of the latest steps that were not too high
        self._steps_above = 0

    @property
    def usual(self) -> float:
        """The median of the usual losses."""
        return median(self._usual)

    def explodes(self, loss: float) -> bool:
        """Add the loss of a step; return whether it completes 20 steps with a loss that is too high."""
        if len(self._usual) >= self.steps and loss > self.factor * self.usual:
            self._steps_above += 1
        else:
            self._usual.append(loss)
            self._steps_above = 0
        return self._steps_above == self.steps
