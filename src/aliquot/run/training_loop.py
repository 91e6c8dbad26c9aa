"""The steps of a run, what happens between them, and what comes after the last one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aliquot.checkpoint.background_saver import Saver
from aliquot.checkpoint.background_task import SaveEvents
from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.directories import newest
from aliquot.checkpoint.live_parts import copier_for
from aliquot.checkpoint.remote_upload import Uploader
from aliquot.core.errors import DivergedError, RunDirectoryError, TrainingError, UserError
from aliquot.core.intervals import is_due
from aliquot.core.on_rank_0 import run_on_rank_0
from aliquot.data.batch_prefetch import BatchesAhead, ToGpu
from aliquot.data.batches import StepBatch
from aliquot.data.token_store import answer_ends
from aliquot.distributed.heartbeat import Heartbeat
from aliquot.distributed.watchdog import Watchdog
from aliquot.machine.allocator import PeriodicRelease
from aliquot.models.model_files import model_files
from aliquot.models.model_identity import computed
from aliquot.models.structure import attention_widths
from aliquot.nn.experts.expert_modules import has_experts
from aliquot.nn.experts.routing import counted, mean_balance, noted_balance, spread
from aliquot.observe import run_summary
from aliquot.observe.ledger import STEADY_PEAK
from aliquot.observe.recorder import Recorder
from aliquot.observe.throughput import model_flops
from aliquot.run import export_run
from aliquot.run.evaluate import compile_evaluation, evaluate
from aliquot.run.run_context import Attempt, Inputs, Model, Stage, Start
from aliquot.run.shutdown import Phase, Shutdown


@dataclass(frozen=True)
class Result:
    """How a run ended: the last step's training loss and the final perplexity, None where there was nothing to do."""

    directory: Path
    steps: int
    loss: float | None
    perplexity: float | None
    export: Path | None


class Training:
    """The steps of a run and what happens between them."""

    def __init__(
        self,
        run: Attempt,
        inputs: Inputs,
        model: Model,
        start: Start,
        record: Recorder,
        shutdown: Shutdown,
        watchdog: Watchdog,
        mirror: Uploader,
        heartbeat: Heartbeat,
    ) -> None:
        self._run = run
        self._heartbeat = heartbeat
        self._inputs = inputs
        self._model = model
        self._record = record
        self._shutdown = shutdown
        self._watchdog = watchdog
        self._mirror = mirror
        self._engine = model.engine
        learns_all = run.config.data.train_on == "all"
        self._files = model_files(
            inputs.source.config, inputs.tokenizer, inputs.source.directory, inputs.data.prefix,
            inputs.data.chat_prefix, answer_ends(inputs.data.open_train().values(), inputs.tokenizer, learns_all),
        )  # fmt: skip
        if model.built.adapter is not None:
            self._files = model.built.adapter.files(self._files, str(run.config.model.path))
        saving = run.config.checkpoint
        if model.plan is not None and model.plan.scratch_bytes_per_node:
            saving = saving.model_copy(update={"buffer_bytes": 0})  # copies of what does not fit would not fit either
        self._saver = Saver(
            run.directory.checkpoints, model.saved,
            CheckpointSpec(model.built.saved, self._files, run.config.train.optimizer_states, model.built.learned),
            run.ranks, saving,
            SaveEvents(
                record.warn, on_saved=self._saved, on_failed=self._not_saved, heartbeat=watchdog.beat,
                check_directory=run.directory.check_publish, protected_steps=lambda: mirror.protected_steps,
            ),
            copier_for(run.ranks.topology.device),
        )  # fmt: skip
        self._attention_widths = attention_widths(inputs.source.config)
        self._start = start
        self._done, self._end = start.step, inputs.total_steps
        self._tokens = start.tokens
        self._loss: float | None = None
        self._perplexity: float | None = None
        self._evaluations = start.evaluations
        self._saved_step = start.step  # of the newest checkpoint
        self._freed = PeriodicRelease(start.step)

    def all_steps(self) -> None:
        """Raises Terminated once it is saved what a signal has cut short, DivergedError for numbers that are none."""
        ranks, first, stop = self._run.ranks, self._done, self._inputs.total_steps
        given_up = self._evaluation_is_due() and self._evaluations.last_step != first  # or the one before all steps
        if given_up and (stopping := self._evaluate()):
            raise self._shutdown.stopped_before(stopping, first + 1)
        if given_up and 0 < first == self._evaluations.last_step:
            # Or it would be evaluated again; and what was best may be of another run.
            self._saver.start(first, self._state(), self._evaluations.retained_step(self._run.config.checkpoint))
        to_gpu = ToGpu() if ranks.topology.device == "cuda" else None
        with BatchesAhead(self._inputs.batches, ranks.rank, ranks.world_size, first, stop, to_gpu) as batches:
            while self._done < self._end:
                self._run.activity.enter(Stage.STEP, self._done + 1, saving=self._saver.current_step)
                self._record.begin()
                batch = batches.take(self._done)
                stopping, metrics = self._step(self._done, batch)
                self._between_steps(stopping, metrics)

    def _step(self, step: int, batch: StepBatch) -> tuple[int, dict[str, Any]]:
        """The signal by which a rank was told to stop, or 0, and what is to be logged."""
        settings, engine, record, saver = self._run.config.train, self._engine, self._record, self._saver
        record.enter("forward")
        losses = []
        for index, micro_batch in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            losses.append(engine.backward(micro_batch, 1 / max(1, batch.predicted), last))
        summed = [0.0] * len(batch.predicted_of)  # of each source
        for micro_batch, loss in zip(batch.micro_batches, torch.stack(losses).tolist(), strict=True):
            summed[0 if micro_batch is None else micro_batch.source] += loss

        # The one exchange of small values in a step: all ranks decide by the same numbers what they do next.
        own = {
            "loss": summed,
            "stop": self._shutdown.requested,
            "save": saver.report(),
            "mirror": self._mirror.report(),
            "freed": self._freed.is_due(step),
            "lost": self._run.directory.why_lost(),
        }
        reports = record.gather(own, batch.own_tokens)
        if (lost := reports[0]["lost"]) is not None:
            raise RunDirectoryError(lost)
        record.enter("checkpoint")
        self._loss = self._mean_loss(step, [math.fsum(report["loss"]) for report in reports], batch.predicted)
        saver.poll([report["save"] for report in reports])
        self._mirror.poll([report["mirror"] for report in reports])
        saver.before_update()

        record.enter("optimizer")
        rate = self._inputs.schedule.rate(step)
        grad_norm = engine.step(rate, settings.max_grad_norm or None).grad_norm
        if not math.isfinite(grad_norm):
            raise self._diverged(step, f"the gradient norm is {grad_norm}")
        self._done = step + 1
        self._shutdown.enter(Phase.STEPS, self._done)
        self._tokens += batch.tokens
        flops = model_flops(self._model.built.matmul_flops, batch.tokens, batch.lengths, self._attention_widths)
        record.end(batch.tokens, flops, saver.current_step)
        self._watchdog.beat()
        if any(report["freed"] for report in reports):
            self._freed.release(self._done)
        metrics = {"loss": self._loss, "learning_rate": rate, "grad_norm": grad_norm, "tokens": self._tokens}
        of_sources = self._loss_of_sources([report["loss"] for report in reports], batch)
        return max(report["stop"] for report in reports), {**metrics, **of_sources, "epoch": batch.epoch}

    def _between_steps(self, stopping: int, metrics: dict[str, Any]) -> None:
        """In this order: measure, log, evaluate, save, stop. Every rank takes the same way."""
        config, done = self._run.config, self._done
        if self._run.ledger.mark("first step", lambda: self._engine.counters().memory()):
            self._run.ledger.publish(self._run.directory.ledger, self._run.ranks, self._run.about)
        if self._record.due(done):
            self._record.log({**metrics, **self._experts(), **self._engine.counters().traffic()})
        if not stopping and done == self._start.step + 1 < self._end:
            self._compile_evaluation()
        if not stopping and self._evaluation_is_due():
            if self._saver.current_step == self._evaluations.retained_step(config.checkpoint):
                self._run.activity.enter(Stage.SAVE, self._saver.current_step or 0)
                self._saver.finish()  # what is compared with is the best that could be saved
            stopping = self._evaluate()
        last, best = done == self._end, self._evaluations.retained_step(config.checkpoint)
        if stopping and self._saver.current_step is not None and self._no_time_for_another():
            raise self._shutdown.stopped(
                stopping, done, self._saved_step, "checkpoint.grace_s was too short for another"
            )
        at_end = last and config.checkpoint.last
        if at_end or stopping or best == done or is_due(config.checkpoint.every, done):
            self._run.activity.enter(Stage.SAVE, done)
            with self._record.between_steps("checkpoint"):
                self._saver.finish()
                best = self._evaluations.retained_step(config.checkpoint)  # without one that could not be saved
                self._saver.start(done, self._state(), best)
        if stopping and not last:
            self._finish_saving()
            raise self._shutdown.stopped(stopping, self._done, self._saved_step)

    def _experts(self) -> dict[str, object]:
        """How evenly they were chosen, of a mixture, and what that has added to the loss."""
        model = self._model.built.model
        if not has_experts(model):
            return {}
        told = self._run.ranks.gather([counted(model), noted_balance(model)])
        return spread([counts for counts, _ in told]) | mean_balance([noted for _, noted in told])

    def _evaluation_is_due(self) -> bool:
        settings, done = self._run.config.train, self._done
        return settings.eval_on_start if done == 0 else done == self._end or is_due(settings.eval_steps, done)

    def _compile_evaluation(self) -> None:
        """With train.compile, and not within the first evaluation: a signal that came meanwhile would find many steps
        that are not saved, and a process that cannot save them yet. Not before the first step, either: what trains is
        compiled for any length then, which is slower."""
        if self._run.config.train.compile == "none" or not self._inputs.held_out:
            return
        self._run.display.line("compiling what evaluates, before the second step")
        self._run.activity.enter(Stage.COMPILE_EVALUATION)
        for batches in self._inputs.held_out.values():
            compile_evaluation(self._engine, batches, self._run.ranks)
            self._watchdog.beat()

    def _evaluate(self) -> int:
        """The signal for which it was given up, or 0."""
        ranks, held_out = self._run.ranks, self._inputs.held_out
        if not held_out:
            return 0
        self._run.activity.enter(Stage.EVALUATE)
        total, before = sum(batches.count(ranks.world_size) for batches in held_out.values()), 0

        def progress(done: int, _: int) -> None:
            self._watchdog.beat()
            self._record.evaluating(before + done, total)

        found = {}
        for name, batches in held_out.items():
            result = evaluate(self._engine, batches, ranks, progress, self._stopped)
            if result is None:
                return self._stopped()
            found[name] = result
            before += batches.count(ranks.world_size)
        self._perplexity = self._record.evaluated(found)
        self._freed.release(self._done)  # blocks of other sizes, between which steps would find less and less room
        if self._done > 0:
            self._compare(next(iter(found.values()))[0])  # the first set counts
        return 0

    def _compare(self, loss: float) -> None:
        """Whether it is the best evaluation, and whether there have been enough without a better one."""
        settings = self._run.config.train
        self._evaluations = self._evaluations.after(self._done, loss, settings.early_stopping_threshold)
        if self._evaluations.exhausts(settings.early_stopping_patience) and self._done < self._end:
            self._end = self._done
            self._record.stopped_early(self._evaluations.summary())

    def _no_time_for_another(self) -> bool:
        """After the checkpoint that is under way: whether the next, begun now, would be killed. Collective."""
        before = self._saved_step
        self._saver.finish()
        left_s = self._run.ranks.gather(self._shutdown.left_s - self._saver.worked_s)
        if min(left_s) > 0 or self._saved_step == before:  # or it could not be saved: what is lost is lost anyway
            return False
        self._finish_saving()
        return True

    def _finish_saving(self) -> None:
        self._run.activity.enter(Stage.FINISH_SAVE)
        self._saver.finish()
        if self._saved_step == self._done and self._shutdown.phase is not Phase.SETUP:
            self._shutdown.enter(Phase.COPYING, self._done)
        self._run.activity.enter(Stage.COPY_TO_MIRROR)
        self._mirror.finish()

    def _saved(self, step: int, seconds: float, stall_s: float) -> None:
        self._record.saved(step, seconds, stall_s)
        self._saved_step = step
        self._mirror.start(step, self._saver.best, just_saved=True)
        self._freed.release(self._done)

    def _not_saved(self, step: int) -> None:
        """What was best before it is the best again; at the end the weights themselves are there to be exported."""
        if self._run.config.checkpoint.best and step != self._end:
            self._evaluations = self._evaluations.without_checkpoint(step)

    def _give_up(self, _: object) -> None:
        """An export, of which all would be lost: a checkpoint can be saved in the time that is left."""
        if self._shutdown.requested:
            raise TrainingError("told to stop before the export was done")
        if (lost := self._run.directory.why_lost()) is not None:
            raise RunDirectoryError(lost)

    def _stopped(self) -> int:
        """The signal by which any rank was told to stop, or 0. Collective."""
        return int(max(self._run.ranks.gather(self._shutdown.requested)))

    def _mean_loss(self, step: int, sums: list[float], predicted: int) -> float:
        """The loss of the global batch: the mean over all of its predicted tokens."""
        bad = [str(rank) for rank, value in enumerate(sums) if not math.isfinite(value)]
        if bad:
            raise self._diverged(step, f"the loss is not finite on rank {', '.join(bad)}")
        return math.fsum(sums) / max(1, predicted)

    def _loss_of_sources(self, sums: list[list[float]], batch: StepBatch) -> dict[str, float]:
        """The mean over the predicted tokens of each named source that is in the batch."""
        sources = zip(self._inputs.batches.names, zip(*sums, strict=True), batch.predicted_of, strict=True)
        return {f"loss_{name}": math.fsum(own) / predicted for name, own, predicted in sources if name and predicted}

    def _diverged(self, step: int, reason: str) -> DivergedError:
        """Why the run ends, on every rank at once; a checkpoint that is being saved is good and is finished first."""
        self._finish_saving()
        kept = newest(self._run.directory.checkpoints)
        where = f"the last checkpoint is {kept}" if kept else "there is no checkpoint yet"
        return DivergedError(f"step {step + 1}: {reason}; {where}. Try a lower train.learning_rate or more warm-up")

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds beside weights and moments."""
        config, batches = self._run.config, self._inputs.batches
        position, ends = batches.position(self._done), batches.steps.ends
        if self._done == self._start.step:  # of earlier stages, whose data may have ended elsewhere
            position, ends = self._start.position, self._start.ends
        return {
            "step": self._done,
            "tokens": self._tokens,
            "position": vars(position),
            "ends": ends,
            "evaluations": self._evaluations.to_json(),
            "evaluated": self._inputs.evaluated,
            # Every draw is made from (seed, name or epoch): the seed is all the state that randomness has.
            "rng": {"seed": config.run.seed},
            "determinants": self._inputs.determinants(config),
            "model": computed(self._inputs.source.config),
            "engine": self._model.engine_name,
            "config": config.model_dump(mode="json", by_alias=True),
        }

    # Finishing

    def finish(self) -> Result:
        """All is saved and measured, then exported, then shown."""
        run, exports = self._run, self._run.config.checkpoint.export
        self._finish_saving()
        if (stopping := self._stopped()) and self._saved_step != self._done:  # there will be no export, either
            self._saver.start(self._done, self._state(), self._evaluations.retained_step(run.config.checkpoint))
            self._finish_saving()
        self._watchdog.stop()
        if stopping:
            raise self._shutdown.stopped(stopping, self._done, self._saved_step)
        # With a checkpoint of the last step a signal ends the run at once; without, the export is all that is kept.
        if self._saved_step == self._done:
            self._shutdown.enter(Phase.EXPORT, self._done)
        else:
            self._shutdown.enter(Phase.SOLE_EXPORT if exports else Phase.UNSAVED, self._done)
        run.ledger.mark(STEADY_PEAK, self._engine.counters().memory())
        self._record.finish()
        trained, exported = (run, self._inputs, self._model), None
        run_on_rank_0(run.ranks, run.directory.check_publish)
        if exports:
            self._run.activity.enter(Stage.EXPORT)
            try:
                exported = export_run.export_run(*trained, self._files, self._evaluations, self._done, self._give_up)
            except UserError:  # the same on every rank
                if self._saved_step != self._done:  # checkpoint.last is false: what was trained is nowhere else
                    self._saver.start(self._done, self._state(), self._evaluations.retained_step(run.config.checkpoint))
                    self._finish_saving()
                if stopping := self._stopped():
                    raise self._shutdown.stopped(stopping, self._done, self._saved_step) from None
                raise
            self._shutdown.enter(Phase.DONE, self._done)
            if stopping := self._stopped():  # when it was almost done
                raise self._shutdown.stopped_after_export(stopping, self._done)
        self._run.activity.enter(Stage.SAMPLE)
        said = export_run.sample(*trained)
        # Of an attempt that had nothing left but this, memory says nothing about the run.
        rows = [] if self._done == self._start.step else run.ledger.publish(run.directory.ledger, run.ranks, run.about)
        self._heartbeat.stop()
        if run.ranks.rank == 0:
            speed = self._record.meter.overall()
            run_summary.finish(run.display, run.directory, rows, speed, said, exported, run.ledger.plan)
        self._engine.close()
        return Result(run.directory.path, self._done, self._loss, self._perplexity, exported)
