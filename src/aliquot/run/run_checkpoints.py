"""Save the checkpoints of a run and copy them to the mirror, also in the time that is left after a stop signal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aliquot.checkpoint.background_task import SaveEvents
from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.live_parts import copier_for
from aliquot.checkpoint.mirror import Uploader
from aliquot.checkpoint.save import Saver
from aliquot.models.model_config import computation_settings
from aliquot.run.hub_upload import names_on_hub
from aliquot.run.run_context import RunContext, Stage, Start, TrainingContext
from aliquot.run.shutdown import Phase


def start_uploads(
    run: RunContext, start: Start, warn: Callable[[str], None], beat: Callable[[], None] = lambda: None
) -> Uploader:
    """Return the uploader of this run, and re-queue uploads that a killed process left unfinished."""
    config, root = run.config, run.directory.checkpoints
    events = SaveEvents(warn, run.display.line, heartbeat=beat, check_directory=run.directory.check_publish)
    uploader = Uploader(config.mirror, root, run.ranks, config.checkpoint, events)
    if start.resumed_from is not None and start.resumed_from.parent.resolve() == root.resolve():
        best = start.evaluations.retained_step(config.checkpoint)
        for step in sorted({start.step, *([] if best is None else [best])}):
            uploader.start(step, best)
    return uploader


class RunCheckpoints:
    """Saves checkpoints of a run, one at a time, in the background of training. Every method is a collective."""

    def __init__(self, training: TrainingContext) -> None:
        run, model, recorder = training.run, training.model, training.recorder
        self._training = training
        self._uploader = start_uploads(run, training.start, recorder.warn, training.watchdog.beat)
        settings = run.config.checkpoint
        if model.plan is not None and model.plan.scratch_bytes_per_node:
            # The model does not fit into memory, so copies for a save would not fit either.
            settings = settings.model_copy(update={"buffer_bytes": 0})
        states = run.config.train.optimizer_states
        self._saver = Saver(
            run.directory.checkpoints, model.saved,
            CheckpointSpec(model.built.saved, training.files, states, model.built.learned), run.ranks, settings,
            SaveEvents(
                recorder.warn, on_saved=self._on_saved, on_failed=self._on_failed, heartbeat=training.watchdog.beat,
                check_directory=run.directory.check_publish,
                protected_steps=lambda: self._uploader.protected_steps,
            ),
            copier_for(run.ranks.topology.device),
        )  # fmt: skip

    @property
    def current_step(self) -> int | None:
        """The step of the save in progress; None if no save is in progress."""
        return self._saver.current_step

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation, whose checkpoint is retained; None without `checkpoint.best`."""
        return self._training.progress.evaluations.retained_step(self._training.run.config.checkpoint)

    def report(self) -> dict[str, Any]:
        """Return this rank's progress with the save and the upload. `poll` takes the reports of all ranks."""
        return {"save": self._saver.report(), "mirror": self._uploader.report()}

    def poll(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Advance the save and the upload in progress. Raises UserError as Saver.poll does."""
        self._saver.poll([report["save"] for report in reports])
        self._uploader.poll([report["mirror"] for report in reports])

    def before_update(self) -> None:
        """Wait until the save in progress permits the optimizer to change weights and moments."""
        self._saver.before_update()

    def save(self) -> None:
        """Wait for the save in progress, then begin to save the last finished step."""
        training = self._training
        training.run.activity.enter(Stage.SAVE, training.progress.step)
        with training.recorder.between_steps("checkpoint"):
            self._saver.finish()
            self.start_save()  # after `finish`, because a failed save changes the best step

    def save_now(self) -> None:
        """Save the last step, and wait until the checkpoint and its copy are complete."""
        self.start_save()
        self.finish()

    def start_save(self) -> None:
        """Begin to save the last finished step."""
        self._saver.start(self._training.progress.step, self._state(), self.best_step)

    def finish_save(self) -> None:
        """Wait for the save in progress."""
        self._training.run.activity.enter(Stage.SAVE, self._saver.current_step or 0)
        self._saver.finish()

    def finish(self) -> None:
        """Wait for the save in progress, then for the copies to the mirror."""
        training = self._training
        training.run.activity.enter(Stage.FINISH_SAVE)
        self._saver.finish()
        if training.progress.is_saved and training.shutdown.phase is not Phase.SETUP:
            training.shutdown.enter(Phase.COPYING, training.progress.step)
        training.run.activity.enter(Stage.COPY_TO_MIRROR)
        self._uploader.finish()

    def finish_if_late(self) -> bool:
        """Wait for the save in progress; if the grace period leaves no time for another save, call `finish`.

        Returns whether `finish` was called. If the save in progress has failed, another save is worth a try in any
        case, so `finish` is not called.
        """
        before = self._training.progress.saved_step
        self._saver.finish()
        left_s = self._training.run.ranks.gather(self._training.shutdown.left_s - self._saver.worked_s)
        if min(left_s) > 0 or self._training.progress.saved_step == before:
            return False
        self.finish()
        return True

    def _on_saved(self, step: int, seconds: float, stall_s: float) -> None:
        self._training.recorder.saved(step, seconds, stall_s)
        self._training.progress.saved_step = step
        self._uploader.start(step, self._saver.best, just_saved=True)
        self._training.memory_release.release(self._training.progress.step)
        self._training.call_back("on_save", {"seconds": seconds, "stall_s": stall_s})

    def _on_failed(self, step: int) -> None:
        """Restore the previous best step, unless this is the last step, whose weights can be exported from memory."""
        progress = self._training.progress
        if self._training.run.config.checkpoint.best and step != progress.last_step:
            progress.evaluations = progress.evaluations.without_checkpoint(step)

    def _state(self) -> dict[str, Any]:
        """The state of a checkpoint: everything but weights, moments and files."""
        run, inputs, start, progress = (
            self._training.run, self._training.inputs, self._training.start, self._training.progress,
        )  # fmt: skip
        position, ends = inputs.batches.position(progress.step), inputs.batches.steps.ends
        if progress.step == start.step:  # an earlier run trained this step, perhaps on other data
            position, ends = start.position, start.ends
        return {
            "step": progress.step,
            "tokens": progress.tokens,
            "position": vars(position),
            "ends": ends,
            "evaluations": progress.evaluations.to_json(),
            "evaluated": inputs.evaluated,
            # All random numbers depend only on the seed and a name or epoch, so the seed is the whole random state.
            "rng": {"seed": run.config.run.seed},
            "determinants": inputs.determinants(run.config),
            "sizes": inputs.batches.sizes(),
            "model": computation_settings(inputs.source.config),
            "engine": self._training.model.engine_name,
            "config": run.config.model_dump(mode="json", by_alias=True),
            "hub_ids": names_on_hub(run.config),
        }
