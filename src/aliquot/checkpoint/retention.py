"""Retention: remove old checkpoints of a run, except the newest ones and the one that evaluated best.

With `checkpoint.best` the symbolic link `best` points to the best checkpoint, for users. A run itself reads the best
step from the state of the newest checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from aliquot.checkpoint.directories import NAME, complete_directories, directories, directory_of, step_of
from aliquot.config.schema import CheckpointSection
from aliquot.tensor_io.publish import clean_leftovers, remove_directory

BEST = "best"


@dataclass(frozen=True)
class EvaluationHistory:
    """The best evaluation of a run so far. Every checkpoint stores the history in its state, for resumed runs."""

    best_step: int | None = None  # None: no evaluation yet
    best_value: float = math.inf  # the metric of the evaluation after `best_step`
    without_improvement: int = 0  # number of evaluations in a row, up to the newest, without improvement
    last_step: int | None = None  # step of the newest evaluation
    metric: str = "loss"  # train.metric_for_best_model
    # The best step and value before `best_step`, in case the save of `best_step` fails. A state does not store them: if
    # the state is saved, the checkpoint of its best step is saved, too.
    previous_best: tuple[int | None, float] = field(default=(None, math.inf), compare=False)

    def after(self, step: int, value: float, threshold: float) -> Self:
        """Return the history including the evaluation after `step`, whose metric is `value`.

        For early stopping, a value is an improvement if it is better than the best value by more than `threshold`. The
        best evaluation is the one with the best value by any margin. Both are as in transformers.
        """
        gain = value - self.best_value if self._greater_is_better else self.best_value - value
        improved = self.best_step is None or gain > threshold
        is_best = math.isfinite(value) if self.best_step is None else gain > 0
        old_best = (self.best_step, self.best_value)
        best, previous = ((step, value), old_best) if is_best else (old_best, self.previous_best)
        return type(self)(*best, 0 if improved else self.without_improvement + 1, step, self.metric, previous)

    @property
    def _greater_is_better(self) -> bool:
        return self.metric != "loss"

    def without_checkpoint(self, step: int) -> Self:
        """Return the history after the save of `step` has failed.

        If `step` was the best step, the previous best step takes its place.
        """
        if step != self.best_step:
            return self
        best_step, best_value = self.previous_best
        return replace(self, best_step=best_step, best_value=best_value, previous_best=(None, math.inf))

    def retained_step(self, settings: CheckpointSection) -> int | None:
        """Return the step whose checkpoint retention must keep because of `checkpoint.best`, or None."""
        return self.best_step if settings.best else None

    def exhausts(self, patience: int | None) -> bool:
        """Return whether the last `patience` evaluations brought no improvement (train.early_stopping_patience)."""
        return patience is not None and self.without_improvement >= patience

    def summary(self) -> str:
        """Describe the best evaluation for the log."""
        count, better = self.without_improvement, "higher" if self._greater_is_better else "lower"
        later = f", and none of the {count} later evaluations was {better} by more than the threshold"
        best = f"evaluation {self.metric} {self.best_value:.4f} after step {self.best_step}"
        return (best if self.best_step else "the best checkpoint is gone") + (later if count else "")

    def to_json(self) -> dict[str, Any]:
        if self.best_step is None:
            return {}  # JSON has no infinity
        return {key: value for key, value in asdict(self).items() if key != "previous_best"}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Read the history from the state of a checkpoint, in which 0.1 calls the value `best_loss`."""
        values = state.get("evaluations", {})
        return cls(**{"best_value" if key == "best_loss" else key: value for key, value in values.items()})


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep: the `keep` newest complete ones, and those of step `best` and of protected steps."""

    keep: int
    best: int | None = None
    protected_steps: Collection[int] = ()


def retain(root: Path, current: Path | None, retention: Retention) -> None:
    """Remove the older checkpoints that `retention` does not keep, except `current`, just published or restored."""
    complete, keep = complete_directories(root), retention.keep
    protected = {retention.best, *retention.protected_steps}
    for directory in directories(root):
        is_old = len(complete) > keep and step_of(directory) < step_of(complete[-keep])
        if is_old and directory != current and step_of(directory) not in protected:
            remove_directory(directory)


def name_best(root: Path, best: int | None) -> None:
    """Point the link `best` to the checkpoint of step `best`, or remove the link if `best` is None.

    Errors are ignored, because some file systems have no links.
    """
    link, new_link = root / BEST, root / f".{BEST}"
    with suppress(OSError):
        if best is None or not directory_of(root, best).is_dir():
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or link.readlink() != Path(directory_of(root, best).name):
            new_link.unlink(missing_ok=True)
            new_link.symlink_to(directory_of(root, best).name)
            new_link.replace(link)


def tidy(root: Path, current: Path, retention: Retention) -> None:
    """Update the link `best`, apply retention, and remove leftovers of killed processes. Raises OSError."""
    name_best(root, retention.best)
    retain(root, current, retention)
    clean_leftovers(root, NAME)
