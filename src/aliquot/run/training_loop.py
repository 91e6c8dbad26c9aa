"""The training loop of a run: optimizer steps, and the evaluations and saves between them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from aliquot.checkpoint.directories import complete_directories
from aliquot.checkpoint.retention import EvaluationHistory
from aliquot.core.errors import DivergedError, RunDirectoryError, UserError
from aliquot.core.intervals import is_due
from aliquot.core.on_rank_0 import error_of
from aliquot.data.batch_prefetch import BatchCopier, BatchPrefetcher
from aliquot.data.batches import StepBatch
from aliquot.data.data_summary import StreamedIrregularities
from aliquot.distributed.signals import Terminated
from aliquot.models.meta import attention_widths
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.experts.expert_modules import has_experts, mean_balance, spread, take_balance, take_counts
from aliquot.observe.throughput import model_flops
from aliquot.run.activity import Stage
from aliquot.run.evaluate import Evaluator, mismatched_ratios
from aliquot.run.reference import check_first_step
from aliquot.run.shutdown import Phase, saved_outcome

if TYPE_CHECKING:
    from aliquot.run.trainer import Trainer


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


class TrainingLoop:
    """Runs the optimizer steps of a run; all ranks call the same methods in the same order."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._engine = trainer.model.engine
        self._recorder = trainer.recorder
        self._progress = trainer.progress
        self._checkpoints = trainer.checkpoints
        self._evaluator = Evaluator(trainer)
        self._loss_watch = LossWatch()
        self._irregularities = StreamedIrregularities(trainer.batches)
        self._attention_widths = attention_widths(trainer.resolved.source.config)

    def run(self) -> None:
        """Train until the last step.

        Raises Terminated after a rank has received a stop signal and the run has saved; DivergedError if a loss or a
        gradient is not finite; RunDirectoryError if the run directory was removed or replaced; the UserError of a rank
        that has no batch for the next step, after the run has saved.
        """
        self._evaluate_before_steps()
        trainer, ranks = self._trainer, self._trainer.ranks
        gpu_copier = BatchCopier() if ranks.topology.device == "cuda" else None
        with BatchPrefetcher(
            trainer.batches, ranks.rank, ranks.world_size, self._progress.step, trainer.total_steps, gpu_copier
        ) as batches:
            while self._progress.step < self._progress.last_step:
                self._trainer.activity.enter(
                    Stage.STEP, self._progress.step + 1, saving=self._checkpoints.saver.current_step
                )
                self._recorder.begin()
                batch = batches.take(self._progress.step)
                for line in self._irregularities.news():
                    self._recorder.warn(line)
                reports = self._exchange_reports(batch, self._backward(batch), batches)
                metrics = self._update(batch, reports)
                stop_signal = self._trainer.agreed_signal(report["stop"] for report in reports)
                self._trainer.call_back("on_step_end", metrics)
                self._log(metrics)
                failure = next((error_of(*report["failure"]) for report in reports if report["failure"]), None)
                if not stop_signal and failure is None:
                    stop_signal = self._evaluate_after_step()
                self._save_after_step(stop_signal, failure)
        for line in self._irregularities.totals():
            self._trainer.display.line(line)

    def _evaluate_before_steps(self) -> None:
        """Evaluate the initial weights, or catch up on an evaluation that a stop signal prevented in an earlier run."""
        first, evaluations = self._progress.step, self._progress.evaluations
        if not self._evaluator.is_due or evaluations.last_step == first:
            return
        if stop_signal := self._evaluator.evaluate():
            raise self._trainer.shutdown.stopped(stop_signal, f"before step {first + 1}: start again to continue")
        if 0 < first == self._progress.evaluations.last_step:
            # The checkpoint must hold this evaluation. The best evaluation in the checkpoint may be of another run.
            self._checkpoints.start_save()

    def _backward(self, batch: StepBatch) -> list[dict[str, float]]:
        """Compute the gradients of this rank's micro-batches; return the sums of the metrics of each data source.

        A stop signal between two micro-batches ends the run as a signal after the last finished step does. The resumed
        run repeats the step.
        """
        self._recorder.enter("forward")
        micro_batches, results = self._with_divergence(batch), []
        for index, micro_batch in enumerate(micro_batches):
            if index and self._trainer.stop_poll():
                self._save_after_step(self._trainer.requested_signal(), None)
            is_last = index == len(micro_batches) - 1
            results.append(self._engine.backward(micro_batch, 1 / max(1, batch.predicted), is_last))
        sums: list[dict[str, float]] = [{"loss": 0.0} for _ in batch.predicted_of]
        for micro_batch, result in zip(micro_batches, results, strict=True):
            source_sums = sums[0 if micro_batch is None else micro_batch.source]
            for name, value in (micro_batch or MicroBatch.empty()).metrics(result).items():
                source_sums[name] = source_sums.get(name, 0.0) + value
        return sums

    def _with_divergence(self, batch: StepBatch) -> list[MicroBatch | None]:
        """Return the micro-batches; those of KTO with the divergence of the global batch, which needs a forward pass.

        As in TRL, the divergence is the mean log-ratio of mismatched answers, at least 0, without a gradient.
        """
        objective = self._trainer.batches.format.objective
        if objective is None or not objective.rates_answers:
            return batch.micro_batches
        summed = math.fsum(mismatched_ratios(self._engine, micro_batch) for micro_batch in batch.micro_batches)
        divergence = max(0.0, math.fsum(self._trainer.ranks.gather(summed)) / max(1, batch.predicted))
        return [micro_batch and micro_batch.with_divergence(divergence) for micro_batch in batch.micro_batches]

    def _exchange_reports(
        self, batch: StepBatch, sums: list[dict[str, float]], batches: BatchPrefetcher
    ) -> list[dict[str, Any]]:
        """Gather one report from every rank, so that all ranks decide by the same values.

        Besides KTO's divergence, this is the only exchange of small values in a step.
        """
        # The rank that tokenises a stream waits for its next batch, so that no rank waits for data that never come.
        makes_data = any(stream.maker is not None for stream in self._trainer.resolved.data.streams.values())
        failure = batches.failure(lambda: makes_data and not self._trainer.shutdown.requested)
        report = {
            "failure": failure and [type(failure).__name__, str(failure)],
            "loss": [source_sums.pop("loss") for source_sums in sums],
            "preference": sums,
            "stop": self._trainer.shutdown.requested,
            **self._checkpoints.report(),
            "freed": self._trainer.memory_release.is_due(self._progress.step),
            "lost": self._trainer.directory.lock.why_lost(),
        }
        reports = self._recorder.gather(
            report, sum(len(one.input_ids) for one in batch.micro_batches if one is not None)
        )
        if (lost := reports[0]["lost"]) is not None:
            raise RunDirectoryError(lost)
        return reports

    def _update(self, batch: StepBatch, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Update the weights with the optimizer, and return the metrics of the step."""
        trainer, progress, recorder = self._trainer, self._progress, self._recorder
        step = progress.step
        recorder.enter("checkpoint")
        progress.loss = self._mean_loss([math.fsum(report["loss"]) for report in reports], batch.predicted)
        preference = self._preference_metrics([report["preference"] for report in reports], batch.predicted)
        if step == 0:
            check_first_step(trainer, preference)
        self._checkpoints.poll(reports)
        self._checkpoints.saver.before_update()

        recorder.enter("optimizer")
        rate = trainer.schedule.rate(step)
        grad_norm = self._engine.step(rate, self._trainer.config.train.max_grad_norm or math.inf).grad_norm
        if not math.isfinite(grad_norm):
            raise self._diverged(f"the gradient norm is {grad_norm}")
        progress.step = step + 1
        trainer.shutdown.enter(Phase.STEPS, progress.step)
        progress.tokens += batch.tokens
        flops = model_flops(trainer.model.built.matmul_flops, batch.tokens, batch.lengths, self._attention_widths)
        recorder.end(batch.tokens, flops, self._checkpoints.saver.current_step)
        trainer.watchdog.beat()
        if self._loss_watch.explodes(progress.loss):
            self._warn_of_explosion()
        if any(report["freed"] for report in reports):
            trainer.memory_release.release(progress.step)
        return {
            "loss": progress.loss,
            **preference,
            "learning_rate": rate,
            "grad_norm": grad_norm,
            "tokens": progress.tokens,
            **self._source_losses([report["loss"] for report in reports], batch),
            "epoch": batch.epoch,
        }

    def _warn_of_explosion(self) -> None:
        watch, first = self._loss_watch, self._progress.step - self._loss_watch.steps + 1
        self._recorder.warn(
            f"since step {first} the loss is above {watch.factor} times its usual value of {watch.usual:.4g}:"
            f" train.learning_rate ({self._trainer.config.train.learning_rate:g}) is probably too high. Stop the run,"
            f" and continue with a lower one from a checkpoint before step {first}"
        )

    def _log(self, metrics: dict[str, Any]) -> None:
        if self._trainer.ledger.mark("first step", lambda: self._engine.counters().memory()):
            self._trainer.publish_ledger()
        if self._recorder.is_due(self._progress.step):
            line = self._recorder.log({**metrics, **self._expert_metrics(), **self._engine.counters().traffic()})
            self._trainer.call_back("on_log", line)

    def _evaluate_after_step(self) -> int:
        """Evaluate if an evaluation is due. Returns the signal for which the evaluation was given up, or 0."""
        # Compile the evaluation right after the first step. A stop signal has to wait for the long compilation, and
        # later it would find many unsaved steps. Before the first step, the compilation would make torch.compile use
        # dynamic lengths in the training graph, which is slower.
        if self._progress.step == self._trainer.start.step + 1 < self._progress.last_step:
            self._evaluator.compile()
        if not self._evaluator.is_due:
            return 0
        saving = self._checkpoints.saver.current_step
        if saving is not None and saving == self._checkpoints.best_step:
            self._checkpoints.finish_save()  # a best checkpoint that could not be saved does not count as best
        return self._evaluator.evaluate()

    def _save_after_step(self, stop_signal: int, failure: UserError | None) -> None:
        """Save if a save is due. After a stop signal, or without data, save in any case, and end the run."""
        settings, progress, checkpoints = self._trainer.config.checkpoint, self._progress, self._checkpoints
        is_last = progress.step == progress.last_step
        is_best = progress.step == checkpoints.best_step
        # Of a signal within the next step, the last step may be saved already.
        is_unsaved = progress.step not in (progress.saved_step, checkpoints.saver.current_step)
        if stop_signal and is_unsaved and checkpoints.saver.current_step is not None and checkpoints.finish_if_late():
            raise self._stopped(stop_signal, "checkpoint.grace_s was too short for another")
        is_wanted = (is_last and settings.last) or stop_signal or failure or is_best
        if is_unsaved and (is_wanted or is_due(settings.save_steps, progress.step)):
            checkpoints.save()
        if stop_signal and not is_last:
            checkpoints.finish()
            raise self._stopped(stop_signal)
        if failure is not None:
            checkpoints.finish()
            saved = f"; step {progress.step} is saved: start again to continue" if progress.is_saved else ""
            raise type(failure)(f"{failure}{saved}")

    def _stopped(self, stop_signal: int, *obstacle: str) -> Terminated:
        progress = self._progress
        outcome = saved_outcome(progress.step, progress.saved_step, *obstacle)
        return self._trainer.shutdown.stopped(stop_signal, outcome)

    def _mean_loss(self, sums: list[float], predicted: int) -> float:
        """The mean loss over all predicted tokens of the global batch."""
        bad_ranks = [str(rank) for rank, value in enumerate(sums) if not math.isfinite(value)]
        if bad_ranks:
            raise self._diverged(f"the loss is not finite on rank {', '.join(bad_ranks)}")
        return math.fsum(sums) / max(1, predicted)

    def _preference_metrics(self, sums: list[list[dict[str, float]]], count: int) -> dict[str, float]:
        """The mean of each metric of `count` pairs or rated answers in the global batch; empty for other data."""
        objective = self._trainer.batches.format.objective
        parts = [source_sums for rank_sums in sums for source_sums in rank_sums if source_sums]
        if objective is None or not parts:
            return {}
        return objective.means({name: math.fsum(part[name] for part in parts) for name in parts[0]}, count)

    def _source_losses(self, sums: list[list[float]], batch: StepBatch) -> dict[str, float]:
        """The mean loss of each named data source in the batch, over its predicted tokens."""
        sources = zip(self._trainer.batches.names, zip(*sums, strict=True), batch.predicted_of, strict=True)
        return {
            f"loss_{name}": math.fsum(rank_sums) / predicted
            for name, rank_sums, predicted in sources
            if name and predicted
        }

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
        self._checkpoints.finish()
        checkpoints = complete_directories(self._trainer.directory.checkpoints)
        where = f"the last checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"
        return DivergedError(f"step {step}: {reason}; {where}. Try a lower train.learning_rate or more warm-up")
