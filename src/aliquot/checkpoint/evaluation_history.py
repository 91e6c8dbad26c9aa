"""What the evaluations of a run have found so far: which was best, and for how long none was better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from aliquot.config.schema import CheckpointSection


@dataclass(frozen=True)
class Evaluations:
    """Part of every checkpoint's state, so that a run that goes on knows it. Losses are evaluation losses."""

    best_step: int | None = None  # None: there was no evaluation yet
    best_loss: float = math.inf
    without_improvement: int = 0  # evaluations in a row, the newest ones
    last_step: int | None = None
    # What was best before. No part of the state: a checkpoint is only there where what it calls the best is.
    former: tuple[int | None, float] = field(default=(None, math.inf), compare=False)

    def after(self, step: int, loss: float, threshold: float) -> Self:
        """With the evaluation after `step`; one that is not lower by more than `threshold` is no improvement.

        The best one is the lowest, by however little, as in transformers.
        """
        improved = self.best_step is None or loss < self.best_loss - threshold
        known = (self.best_step, self.best_loss)
        best, former = ((step, loss), known) if loss < self.best_loss else (known, self.former)
        return type(self)(*best, 0 if improved else self.without_improvement + 1, step, former)

    def without_saved(self, step: int) -> Self:
        """The checkpoint of `step` could not be saved: if it was the best, the best is the one before it again."""
        if step != self.best_step:
            return self
        best_step, best_loss = self.former
        return replace(self, best_step=best_step, best_loss=best_loss, former=(None, math.inf))

    def kept_step(self, settings: CheckpointSection) -> int | None:
        """That of the checkpoint which is kept because it evaluated best."""
        return self.best_step if settings.best else None

    def are_enough(self, patience: int | None) -> bool:
        """Whether train.early_stopping_patience is at its end."""
        return patience is not None and self.without_improvement >= patience

    def told(self) -> str:
        """For people."""
        since = f", and none of the {self.without_improvement} evaluations since was better by enough"
        best = f"evaluation loss {self.best_loss:.4f} after step {self.best_step}"
        return (best if self.best_step else "what was best is gone") + (since if self.without_improvement else "")

    def to_json(self) -> dict[str, Any]:
        if self.best_step is None:
            return {}  # JSON has no infinity
        return {key: value for key, value in asdict(self).items() if key != "former"}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """Those in a checkpoint's state."""
        return cls(**state.get("evaluations", {}))
