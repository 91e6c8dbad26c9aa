"""The training loop of a run: optimizer steps, and the evaluations and saves between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aliquot.checkpoint.directories import complete_directories
from aliquot.core.errors import CallbackError, DivergedError, RunDirectoryError, UsageError, UserError
from aliquot.core.intervals import is_due
from aliquot.core.on_rank_0 import error_of
from aliquot.data.batch_prefetch import BatchCopier, BatchPrefetcher
from aliquot.data.batches import StepBatch
from aliquot.data.data_summary import StreamedIrregularities
from aliquot.models.meta import attention_widths
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.experts.expert_modules import has_experts, mean_balance, spread, take_balance, take_counts
from aliquot.observe.throughput import model_flops
from aliquot.run.evaluate import Evaluator, add_metrics, mismatched_ratios
from aliquot.run.reference import check_first_step
from aliquot.run.shutdown import Phase, saved_outcome
from aliquot.run.training_progress import LossWatch, StepTotals

if TYPE_CHECKING:
    from aliquot.run.trainer import Trainer


class TrainingLoop:
    """Runs the optimizer steps of a run; all ranks call the same methods in the same order."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._engine = trainer.model.engine
        self.recorder = trainer.recorder
        self._progress = trainer.progress
        self.checkpoints = trainer.checkpoints
        self._evaluator = Evaluator(trainer)
        self._loss_watch = LossWatch()
        self._irregularities = StreamedIrregularities(trainer.train_batches)
        self._attention_widths = attention_widths(trainer.resolved.source.config)
        self._prefetcher: BatchPrefetcher | None = None
        self._totals = StepTotals()
        self._reports: list[dict[str, Any]] = []  # of all ranks, from the last forward_backward of the step
        self._open_step: int | None = None  # the step that the caller's loop is in
        self._is_complete = False  # whether no further forward_backward adds to the gradient
        self._metrics: dict[str, Any] = {}  # of the last step
        self.caller_metrics: dict[str, float] = {}  # of the caller, for the next line of metrics

    def steps(self) -> Iterator[int]:
        """Yield each step that is left, counted from 0, with evaluations, log lines and saves before and after it.

        Raises Terminated after a rank has received a stop signal and the run has saved; RunDirectoryError if the run
        directory was removed or replaced; the UserError of a rank that has no batch for the next step, after the run
        has saved.
        """
        self._evaluate_before_steps()
        while (step := self._progress.step) < self._progress.last_step:
            self._trainer.activity.enter(f"in step {step + 1}", self.checkpoints.saver.current_step)
            self.recorder.begin()
            self._open_step = step
            yield step
            if self._progress.step == step:
                raise UsageError(f"step {step + 1} ended without optim_step: call it once in each step")
            self._end_step()
        for line in self._irregularities.totals():
            self._trainer.display.line(line)

    def batches(self) -> Iterator[StepBatch]:
        """Yield the batch of each step that is left."""
        trainer, ranks = self._trainer, self._trainer.ranks
        gpu_copier = BatchCopier() if ranks.topology.device == "cuda" else None
        with BatchPrefetcher(
            trainer.train_batches, ranks.rank, ranks.world_size, self._progress.step, trainer.total_steps, gpu_copier
        ) as self._prefetcher:
            for step in self.steps():
                batch = self._prefetcher.take(step)
                for line in self._irregularities.news():
                    self.recorder.warn(line)
                yield batch

    def forward_backward(self, batch: StepBatch, names: Sequence[str], is_last: bool) -> float:
        """Add the gradient of this rank's micro-batches, and return the loss of the global batch. Collective.

        Args:
            names: of the data sources of the batch.
            is_last: whether `update` follows, without another call.

        Raises DivergedError if the loss is not finite, and CallbackError if the caller's loss fails on a rank.
        """
        if self._progress.step != self._open_step or self._is_complete:
            raise UsageError(
                "forward_backward has its place in a step of Trainer.steps or Trainer.batches, before optim_step; all"
                " calls of a step but the last need accumulate=True"
            )
        self._reports = self._exchange_reports(batch, self._backward(batch, is_last))
        if failure := next((report["loss_failure"] for report in self._reports if report["loss_failure"]), None):
            raise CallbackError(failure)
        loss = self._totals.add(batch, self._reports, names, self._trainer.train_batches.format.objective)
        if not math.isfinite(loss):
            ranks = [
                str(rank) for rank, report in enumerate(self._reports) if not all(map(math.isfinite, report["loss"]))
            ]
            raise self._diverged(f"the loss is not finite on rank {', '.join(ranks)}")
        if self._progress.step == 0:
            check_first_step(self._trainer, self._totals.preference)
        self._is_complete = is_last
        return loss

    def evaluate_now(self) -> Mapping[str, Any]:
        """Evaluate, and return the metrics. Collective."""
        if stop_signal := self._evaluator.evaluate():
            self._save_after_step(stop_signal, None)
        return self._evaluator.metrics

    def save_now(self) -> None:
        """Save the last finished step, and wait until the checkpoint is complete. Collective."""
        if self._progress.step not in (self._progress.saved_step, self.checkpoints.saver.current_step):
            self.checkpoints.save()
        self.checkpoints.finish_save()

    def stop_if_requested(self) -> None:
        """End the run as after the last finished step if a rank has received a stop signal. Collective."""
        if stop_signal := self._trainer.stop_poll():
            self._save_after_step(stop_signal, None)

    def _end_step(self) -> None:
        """Log, evaluate and save as the configuration says; end the run after a stop signal, or without data."""
        self._totals = StepTotals()
        stop_signal = self._trainer.stop_poll.agree(report["stop"] for report in self._reports)
        self._trainer.callbacks.call("on_step_end", self._metrics)
        self._log()
        failure = next((error_of(*report["failure"]) for report in self._reports if report["failure"]), None)
        if not stop_signal and failure is None:
            stop_signal = self._evaluate_after_step()
        self._save_after_step(stop_signal, failure)

    def _evaluate_before_steps(self) -> None:
        """Evaluate the initial weights, or catch up on an evaluation that a stop signal prevented in an earlier run."""
        first, evaluations = self._progress.step, self._progress.evaluations
        if not self._evaluator.is_due or evaluations.last_step == first:
            return
        if stop_signal := self._evaluator.evaluate():
            raise self._trainer.shutdown.stopped(stop_signal, f"before step {first + 1}: start again to continue")
        if 0 < first == self._progress.evaluations.last_step:
            # The checkpoint must hold this evaluation. The best evaluation in the checkpoint may be of another run.
            self.checkpoints.start_save()

    def _backward(self, batch: StepBatch, is_last: bool) -> list[dict[str, float]]:
        """Compute the gradients of this rank's micro-batches; return the sums of the metrics of each data source.

        A stop signal between two micro-batches ends the run as a signal after the last finished step does. The resumed
        run repeats the step.
        """
        self.recorder.enter("forward")
        micro_batches, results = batch.micro_batches, []
        for index, micro_batch in enumerate(micro_batches):
            if index:
                self.stop_if_requested()
            last = is_last and index == len(micro_batches) - 1
            results.append(self._engine.backward(micro_batch, 1 / (batch.predicted or 1), last))
        sums: list[dict[str, float]] = [{"loss": 0.0} for _ in batch.predicted_of]
        for micro_batch, result in zip(micro_batches, results, strict=True):
            source = 0 if micro_batch is None else micro_batch.source
            add_metrics(sums[source], (micro_batch or MicroBatch.empty()).metrics(result))
        return sums

    def with_divergence(self, batch: StepBatch) -> StepBatch:
        """Return the batch; that of KTO with the divergence of the global batch, which needs a forward pass.

        As in TRL, the divergence is the mean log-ratio of mismatched answers, at least 0, without a gradient.
        """
        objective = self._trainer.train_batches.format.objective
        if objective is None or not objective.rates_answers:
            return batch
        summed = math.fsum(mismatched_ratios(self._engine, micro_batch) for micro_batch in batch.micro_batches)
        divergence = max(0.0, math.fsum(self._trainer.ranks.gather(summed)) / (batch.predicted or 1))
        micro_batches = [micro_batch and micro_batch.with_divergence(divergence) for micro_batch in batch.micro_batches]
        return replace(batch, micro_batches=micro_batches)

    def _exchange_reports(self, batch: StepBatch, sums: list[dict[str, float]]) -> list[dict[str, Any]]:
        """Gather one report from every rank, so that all ranks decide by the same values.

        Besides KTO's divergence, this is the only exchange of small values in a step.
        """
        # The rank that tokenises a stream waits for its next batch, so that no rank waits for data that never come.
        makes_data = any(stream.maker is not None for stream in self._trainer.resolved.data.streams.values())
        failure = None
        if self._prefetcher is not None:
            failure = self._prefetcher.failure(lambda: makes_data and not self._trainer.shutdown.requested)
        losses = (micro_batch and micro_batch.row_loss for micro_batch in batch.micro_batches)
        report = {
            "failure": failure and [type(failure).__name__, str(failure)],
            "loss_failure": next((loss.failure for loss in losses if loss and loss.failure), None),
            "loss": [source_sums.pop("loss") for source_sums in sums],
            "preference": sums,
            "stop": self._trainer.shutdown.requested,
            **self.checkpoints.report(),
            "freed": self._trainer.memory_release.is_due(self._progress.step),
            "lost": self._trainer.directory.lock.why_lost(),
        }
        reports = self.recorder.gather(
            report, sum(len(one.input_ids) for one in batch.micro_batches if one is not None)
        )
        if (lost := reports[0]["lost"]) is not None:
            raise RunDirectoryError(lost)
        return reports

    def update(self, learning_rate: float | None) -> tuple[float, float]:
        """Update the weights with the optimizer; return the norm of the gradient and the learning rate. Collective.

        `learning_rate`: None for the rate of the schedule. Raises DivergedError if the gradient norm is not finite.
        """
        trainer, progress, recorder, totals = self._trainer, self._progress, self.recorder, self._totals
        if not self._is_complete:
            raise UsageError("optim_step needs a gradient: call forward_backward before, and last without accumulate")
        step = progress.step
        recorder.enter("checkpoint")
        progress.loss = totals.loss
        self.checkpoints.poll(self._reports)
        self.checkpoints.saver.before_update()

        recorder.enter("optimizer")
        rate = trainer.schedule.rate(step) if learning_rate is None else learning_rate
        grad_norm = self._engine.step(rate, trainer.config.train.max_grad_norm or math.inf)
        if not math.isfinite(grad_norm):
            raise self._diverged(f"the gradient norm is {grad_norm}")
        progress.step = step + 1
        trainer.shutdown.enter(Phase.STEPS, progress.step)
        progress.tokens += totals.tokens
        lengths = np.concatenate(totals.lengths)
        flops = model_flops(trainer.model.built.matmul_flops, totals.tokens, lengths, self._attention_widths)
        recorder.end(totals.tokens, flops, self.checkpoints.saver.current_step)
        trainer.watchdog.beat()
        if self._loss_watch.explodes(progress.loss):
            self._warn_of_explosion()
        if any(report["freed"] for report in self._reports):
            trainer.memory_release.release(progress.step)
        self._metrics = {
            "loss": progress.loss,
            **totals.preference,
            "learning_rate": rate,
            "grad_norm": grad_norm,
            "tokens": progress.tokens,
            **totals.source_losses,
            "epoch": totals.epoch,
        }
        self._is_complete = False
        return grad_norm, rate

    def _warn_of_explosion(self) -> None:
        watch, first = self._loss_watch, self._progress.step - self._loss_watch.steps + 1
        self.recorder.warn(
            f"since step {first} the loss is above {watch.factor} times its usual value of {watch.usual:.4g}:"
            f" train.learning_rate ({self._trainer.config.train.learning_rate:g}) is probably too high. Stop the run,"
            f" and continue with a lower one from a checkpoint before step {first}"
        )

    def _log(self) -> None:
        trainer = self._trainer
        if trainer.ledger.mark("first step", lambda: self._engine.counters().memory()):
            trainer.ledger.publish(trainer.directory.ledger, trainer.ranks, trainer.record.as_json())
        if self.recorder.is_due(self._progress.step):
            traffic = self._engine.counters().traffic()
            line = self.recorder.log({**self._metrics, **self._expert_metrics(), **traffic}, self.caller_metrics)
            self.caller_metrics = {}
            trainer.callbacks.call("on_log", line)

    def _evaluate_after_step(self) -> int:
        """Evaluate if an evaluation is due. Returns the signal for which the evaluation was given up, or 0."""
        # Compile the evaluation right after the first step. A stop signal has to wait for the long compilation, and
        # later it would find many unsaved steps. Before the first step, the compilation would make torch.compile use
        # dynamic lengths in the training graph, which is slower.
        if self._progress.step == self._trainer.start.step + 1 < self._progress.last_step:
            self._evaluator.compile()
        if not self._evaluator.is_due:
            return 0
        saving = self.checkpoints.saver.current_step
        if saving is not None and saving == self.checkpoints.best_step:
            self.checkpoints.finish_save()  # a best checkpoint that could not be saved does not count as best
        return self._evaluator.evaluate()

    def _save_after_step(self, stop_signal: int, failure: UserError | None) -> None:
        """Save if a save is due. After a stop signal, or without data, save in any case, and end the run."""
        settings, progress, checkpoints = self._trainer.config.checkpoint, self._progress, self.checkpoints
        is_last = progress.step == progress.last_step
        is_best = progress.step == checkpoints.best_step
        # Of a signal within the next step, the last step may be saved already.
        is_unsaved = progress.step not in (progress.saved_step, checkpoints.saver.current_step)
        if stop_signal and is_unsaved and checkpoints.saver.current_step is not None and checkpoints.finish_if_late():
            outcome = saved_outcome(progress, "checkpoint.grace_s was too short for another")
            raise self._trainer.shutdown.stopped(stop_signal, outcome)
        is_wanted = (is_last and settings.last) or stop_signal or failure or is_best
        if is_unsaved and (is_wanted or is_due(settings.save_steps, progress.step)):
            checkpoints.save()
        if stop_signal and not is_last:
            checkpoints.finish()
            raise self._trainer.shutdown.stopped(stop_signal, saved_outcome(progress))
        if failure is not None:
            checkpoints.finish()
            saved = f"; step {progress.step} is saved: start again to continue" if progress.is_saved else ""
            raise type(failure)(f"{failure}{saved}")

    def _expert_metrics(self) -> dict[str, object]:
        """How evenly tokens are routed to experts, and the balance loss; empty for models without experts."""
        model = self._trainer.model.built.model
        if not has_experts(model):
            return {}
        reports = self._trainer.ranks.gather([take_counts(model), take_balance(model)])
        return spread([counts for counts, _ in reports]) | mean_balance([balance for _, balance in reports])

    def _diverged(self, reason: str) -> DivergedError:
        """Return the error that ends the run on every rank. Finish the save in progress first: its weights are good."""
        step = self._progress.step + 1
        self.checkpoints.finish()
        checkpoints = complete_directories(self._trainer.directory.checkpoints)
        where = f"the last checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"
        return DivergedError(f"step {step}: {reason}; {where}. Try a lower train.learning_rate or more warm-up")
