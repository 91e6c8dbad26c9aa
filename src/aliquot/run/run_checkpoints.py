"""Save the checkpoints of a run and copy them to the mirror, also in the time that is left after a stop signal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aliquot.checkpoint.background_task import SaveEvents
from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.live_parts import copier_for
from aliquot.checkpoint.mirror import Uploader
from aliquot.checkpoint.save import Saver
from aliquot.core.errors import UsageError
from aliquot.core.on_rank_0 import run_on_rank_0
from aliquot.models.model_config import computation_settings
from aliquot.run.hub_upload import names_on_hub
from aliquot.run.shutdown import Phase

if TYPE_CHECKING:
    from aliquot.run.trainer import Trainer


def start_uploads(trainer: Trainer, warn: Callable[[str], None], beat: Callable[[], None] = lambda: None) -> Uploader:
    """Return the uploader of this run, and re-queue uploads that a killed process left unfinished."""
    config, root, start = trainer.config, trainer.directory.checkpoints, trainer.start
    events = SaveEvents(warn, trainer.display.line, heartbeat=beat, check_directory=trainer.directory.check_publish)
    uploader = Uploader(config.mirror, root, trainer.ranks, config.checkpoint, events)
    if start.resumed_from is not None and start.resumed_from.parent.resolve() == root.resolve():
        best = start.evaluations.retained_step(config.checkpoint)
        for step in sorted({start.step, *([] if best is None else [best])}):
            uploader.start(step, best)
    return uploader


class RunCheckpoints:
    """Saves checkpoints of a run, one at a time, in the background of training. Every method is a collective."""

    def __init__(self, trainer: Trainer) -> None:
        model, recorder = trainer.model, trainer.recorder
        self._trainer = trainer
        self._uploader = start_uploads(trainer, recorder.warn, trainer.watchdog.beat)
        settings = trainer.config.checkpoint
        if trainer.resolved.plan is not None and trainer.resolved.plan.scratch_bytes_per_node:
            # The model does not fit into memory, so copies for a save would not fit either.
            settings = settings.model_copy(update={"buffer_bytes": 0})
        states = trainer.config.train.optimizer_states
        self.saver = Saver(
            trainer.directory.checkpoints, model.saved,
            CheckpointSpec(model.built.saved, trainer.files, states, model.built.learned), trainer.ranks, settings,
            SaveEvents(
                recorder.warn, on_saved=self._on_saved, on_failed=self._on_failed, heartbeat=trainer.watchdog.beat,
                check_directory=trainer.directory.check_publish,
                protected_steps=lambda: self._uploader.protected_steps,
            ),
            copier_for(trainer.ranks.topology.device),
        )  # fmt: skip

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation, whose checkpoint is retained; None without `checkpoint.best`."""
        return self._trainer.progress.evaluations.retained_step(self._trainer.config.checkpoint)

    def report(self) -> dict[str, Any]:
        """Return this rank's progress with the save and the upload. `poll` takes the reports of all ranks."""
        return {"save": self.saver.report(), "mirror": self._uploader.report()}

    def poll(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Advance the save and the upload in progress. Raises UserError as Saver.poll does."""
        self.saver.poll([report["save"] for report in reports])
        self._uploader.poll([report["mirror"] for report in reports])

    def save(self) -> None:
        """Wait for the save in progress, then begin to save the last finished step."""
        trainer = self._trainer
        trainer.activity.enter(f"saving step {trainer.progress.step}")
        with trainer.recorder.between_steps("checkpoint"):
            self.saver.finish()
            self.start_save()  # after `finish`, because a failed save changes the best step

    def save_now(self) -> None:
        """Save the last step, and wait until the checkpoint and its copy are complete."""
        self.start_save()
        self.finish()

    def start_save(self) -> None:
        """Begin to save the last finished step."""
        caller = run_on_rank_0(self._trainer.ranks, lambda: _as_json(self._trainer.state))
        self.saver.start(self._trainer.progress.step, {**self._state(), "caller": caller}, self.best_step)

    def finish_save(self) -> None:
        """Wait for the save in progress."""
        self._trainer.activity.enter(f"saving step {self.saver.current_step or 0}")
        self.saver.finish()

    def finish(self) -> None:
        """Wait for the save in progress, then for the copies to the mirror."""
        trainer = self._trainer
        trainer.activity.enter("finishing a checkpoint")
        self.saver.finish()
        if trainer.progress.is_saved and trainer.shutdown.phase is not Phase.SETUP:
            trainer.shutdown.enter(Phase.COPYING, trainer.progress.step)
        trainer.activity.enter("copying checkpoints to the mirror")
        self._uploader.finish()

    def finish_if_late(self) -> bool:
        """Wait for the save in progress; if the grace period leaves no time for another save, call `finish`.

        Returns whether `finish` was called. If the save in progress has failed, another save is worth a try in any
        case, so `finish` is not called.
        """
        before = self._trainer.progress.saved_step
        self.saver.finish()
        left_s = self._trainer.ranks.gather(self._trainer.shutdown.left_s - self.saver.worked_s)
        if min(left_s) > 0 or self._trainer.progress.saved_step == before:
            return False
        self.finish()
        return True

    def _on_saved(self, step: int, seconds: float, stall_s: float) -> None:
        self._trainer.recorder.saved(step, seconds, stall_s)
        self._trainer.progress.saved_step = step
        self._uploader.start(step, self.saver.best, just_saved=True)
        self._trainer.memory_release.release(self._trainer.progress.step)
        self._trainer.callbacks.call("on_save", {"seconds": seconds, "stall_s": stall_s})

    def _on_failed(self, step: int) -> None:
        """Restore the previous best step, unless this is the last step, whose weights can be exported from memory."""
        progress = self._trainer.progress
        if self._trainer.config.checkpoint.best and step != progress.last_step:
            progress.evaluations = progress.evaluations.without_checkpoint(step)

    def _state(self) -> dict[str, Any]:
        """The state of a checkpoint: everything but weights, moments and files."""
        trainer, batches = self._trainer, self._trainer.train_batches
        run, start, progress = trainer.resolved, trainer.start, trainer.progress
        position, ends = batches.position(progress.step), batches.steps.ends
        if progress.step == start.step:  # an earlier run trained this step, perhaps on other data
            position, ends = start.position, start.ends
        return {
            "step": progress.step,
            "tokens": progress.tokens,
            "position": vars(position),
            "ends": ends,
            "evaluations": progress.evaluations.to_json(),
            "evaluated": run.evaluated,
            # All random numbers depend only on the seed and a name or epoch, so the seed is the whole random state.
            "rng": {"seed": run.config.run.seed},
            "determinants": run.determinants(),
            "sizes": batches.sizes(),
            "model": computation_settings(run.source.config),
            "engine": self._trainer.model.engine_name,
            "config": run.config.model_dump(mode="json", by_alias=True),
            "hub_ids": names_on_hub(run.config),
        }


def _as_json(state: dict[str, Any]) -> Any:
    """Return a copy of the caller's state. Raises UsageError if it is no JSON."""
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Trainer.state must be JSON, because checkpoints hold it: {error}") from None
