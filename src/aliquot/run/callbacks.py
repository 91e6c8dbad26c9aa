"""Callbacks: code of the user that a run calls after its steps, log lines, evaluations and saves."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from aliquot.checkpoint.directories import directory_of
from aliquot.core.errors import CallbackError, UsageError, describe_failure
from aliquot.core.on_rank_0 import run_on_rank_0

if TYPE_CHECKING:
    from aliquot.run.trainer import Trainer

Event = Literal["on_step_end", "on_log", "on_evaluate", "on_save"]


@dataclass(frozen=True)
class RunState:
    """The state of a run at one event. A callback may keep the object: later steps do not change it.

    Attributes:
        directory: The run directory, for example `runs/mine`.
        step: The number of finished optimizer steps, including the steps of earlier starts of this run.
        last_step: The step after which the run ends.
        epoch: The number of finished epochs, for example 1.5.
        tokens: The number of tokens trained so far, without padding.
        metrics: The values of this event, under their names in `metrics.jsonl`.
        checkpoint: The directory of the newest complete checkpoint. None before the first checkpoint.
    """

    directory: Path
    step: int
    last_step: int
    epoch: float
    tokens: int
    metrics: Mapping[str, Any]
    checkpoint: Path | None
    _stop: threading.Event = field(repr=False, compare=False)

    def stop(self) -> None:
        """End the run as its last step would: with the last evaluation, checkpoint and export.

        All ranks end after the present step. After `stop` in `on_save`, they end after the next step, because a save
        may be complete in the middle of a step. If the run starts again, it continues after its last step.
        """
        self._stop.set()


class Callback:
    """The base class of callbacks for `aliquot.train`. Override any of its methods, which do nothing.

    Rank 0 calls the methods; the other ranks wait, so a slow callback slows down training. A method must not call
    collectives. An exception in a method ends the run on all ranks with a `UserError` that names the callback, file and
    line. The run first completes the checkpoint that is being saved.
    """

    def on_step_end(self, run: RunState) -> None:
        """Called after each optimizer step. `run.metrics` has loss, learning_rate, grad_norm, tokens and epoch."""

    def on_log(self, run: RunState) -> None:
        """Called after each logged step (`train.logging_steps`). `run.metrics` is its line of `metrics.jsonl`."""

    def on_evaluate(self, run: RunState) -> None:
        """Called after each evaluation. `run.metrics` has eval_loss, eval_perplexity and, for texts, bits per byte."""

    def on_save(self, run: RunState) -> None:
        """Called when a checkpoint is complete in the directory `run.checkpoint`.

        A checkpoint is written while training continues, so `run.step` may be later than the step of the checkpoint.
        `run.metrics` has the seconds of the save, and stall_s, the seconds for which training waited.
        """


class Callbacks:
    """The callbacks of a run. Rank 0 calls them, and all ranks learn whether a callback failed or asked to stop."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        """Collective. The callbacks of ranks other than rank 0 are ignored."""
        self._trainer, self._callbacks = trainer, list(callbacks)
        self._stop = threading.Event()
        self._is_empty = not trainer.ranks.gather(len(callbacks))[0]
        self._stopped_by: str | None = None  # the callback that has asked to stop, the same on every rank

    def call(self, event: Event, metrics: Mapping[str, Any]) -> None:
        """Call the method `event` of all callbacks on rank 0, and end the run early if one asks to stop. Collective.

        Raises CallbackError on every rank if a callback fails.
        """
        if self._is_empty:
            return
        trainer, start, progress = self._trainer, self._trainer.start, self._trainer.progress
        batches, saved = trainer.train_batches, directory_of(trainer.directory.checkpoints, progress.saved_step)
        state = RunState(
            directory=trainer.directory.path, step=progress.step, last_step=progress.last_step,
            epoch=batches.sequences_until(progress.step) / batches.epoch_sequences, tokens=progress.tokens,
            metrics=MappingProxyType(dict(metrics)),
            checkpoint=saved if progress.saved_step > start.step else start.resumed_from, _stop=self._stop,
        )  # fmt: skip
        self._stopped_by = run_on_rank_0(trainer.ranks, lambda: self._call(event, state))
        trainer.watchdog.beat()
        # A save may complete in the middle of a step, which must end first. Without any step, there is nothing to save.
        if self._stopped_by is not None and event != "on_save" and progress.step > start.step:
            progress.end_early(f"callback {self._stopped_by} called stop()", trainer.recorder)

    def _call(self, event: Event, state: RunState) -> str | None:
        for callback in self._callbacks:
            try:
                getattr(callback, event)(state)
            except Exception as error:
                self._callbacks.clear()  # the end of the run may complete a save, which is an event, too
                what = f"{type(callback).__name__}.{event} failed after step {state.step}"
                raise CallbackError(
                    f"{describe_failure(getattr(callback, event), what, error)}. Correct the callback and start again:"
                    " the run continues after its newest checkpoint"
                ) from error
            if self._stop.is_set() and self._stopped_by is None:
                self._stopped_by = type(callback).__name__
        return self._stopped_by


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Raise UsageError for objects that are no callbacks, and for methods that a run would never call."""
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            advice = f"{name}(), not the class" if isinstance(callback, type) else "objects of subclasses of it"
            raise UsageError(f"callbacks: {name} is not an object of aliquot.Callback: pass {advice}")
        unknown = [name for name in dir(type(callback)) if name.startswith("on_") and name not in events]
        if unknown:
            raise UsageError(
                f"callbacks: {type(callback).__name__}.{unknown[0]} would never be called: a run calls"
                f" {', '.join(events)}. Rename the method"
            )
