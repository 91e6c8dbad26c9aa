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
    best_loss: float = math.inf  # evaluation loss after `best_step`
    without_improvement: int = 0  # number of evaluations in a row, up to the newest, without improvement
    last_step: int | None = None  # step of the newest evaluation
    # The best step and loss before `best_step`, in case the save of `best_step` fails. A state does not store them: if
    # the state is saved, the checkpoint of its best step is saved, too.
    previous_best: tuple[int | None, float] = field(default=(None, math.inf), compare=False)

    def after(self, step: int, loss: float, threshold: float) -> Self:
        """Return the history including the evaluation after `step`.

        For early stopping, a loss is an improvement if it is lower than the best loss by more than `threshold`. The
        best evaluation is the one with the lowest loss by any margin. Both are as in transformers.
        """
        improved = self.best_step is None or loss < self.best_loss - threshold
        old_best = (self.best_step, self.best_loss)
        best, previous = ((step, loss), old_best) if loss < self.best_loss else (old_best, self.previous_best)
        return type(self)(*best, 0 if improved else self.without_improvement + 1, step, previous)

    def without_checkpoint(self, step: int) -> Self:
        """Return the history after the save of `step` has failed.

        If `step` was the best step, the previous best step takes its place.
        """
        if step != self.best_step:
            return self
        best_step, best_loss = self.previous_best
        return replace(self, best_step=best_step, best_loss=best_loss, previous_best=(None, math.inf))

    def retained_step(self, settings: CheckpointSection) -> int | None:
        """Return the step whose checkpoint retention must keep because of `checkpoint.best`, or None."""
        return self.best_step if settings.best else None

    def exhausts(self, patience: int | None) -> bool:
        """Return whether the last `patience` evaluations brought no improvement (train.early_stopping_patience)."""
        return patience is not None and self.without_improvement >= patience

    def summary(self) -> str:
        """Describe the best evaluation for the log."""
        since = f", and none of the {self.without_improvement} later evaluations was lower by more than the threshold"
        best = f"evaluation loss {self.best_loss:.4f} after step {self.best_step}"
        return (best if self.best_step else "the best checkpoint is gone") + (since if self.without_improvement else "")

    def to_json(self) -> dict[str, Any]:
        if self.best_step is None:
            return {}  # JSON has no infinity
        return {key: value for key, value in asdict(self).items() if key != "previous_best"}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Read the history from the state of a checkpoint."""
        return cls(**state.get("evaluations", {}))


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep: the `keep` newest complete ones, and those of step `best` and of protected steps."""

    keep: int
    best: int | None = None
    protected_steps: Collection[int] = ()


def retain(root: Path, current: Path, retention: Retention) -> None:
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
