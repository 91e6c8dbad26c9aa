"""Evaluate perplexity and bits per byte on evaluation sets, during a run or for a model directory alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aliquot.config.schema import RunConfig
from aliquot.core.intervals import is_due
from aliquot.data.data_summary import irregularities
from aliquot.data.eval_batches import EvalBatches
from aliquot.distributed.ranks import Ranks
from aliquot.engines.base import Engine
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.preference_loss import Answers, RatedAnswers

if TYPE_CHECKING:
    from aliquot.run.trainer import Trainer


def evaluate(
    engine: Engine,
    batches: EvalBatches,
    ranks: Ranks,
    progress: Callable[[int, int, float], None],
    stop_requested: Callable[[bool], int],
) -> dict[str, float] | None:
    """Evaluate the model on one evaluation set. Collective.

    Args:
        progress: called with the number of finished micro-batches, the total and the seconds since the start, before
            the first micro-batch and after each micro-batch.
        stop_requested: called before each micro-batch, with whether it is the first; if its result is not 0, the
            evaluation is given up.

    Returns:
        Loss and perplexity per predicted token, and bits per byte if the size of the text is known; for pairs of
        answers or rated answers, their mean loss and TRL's metrics. None if given up.
    """
    sums: dict[str, float] = {}
    objective, rated, ratios = batches.format.objective, list[tuple[RatedAnswers, Tensor]](), 0.0
    total = batches.count(ranks.world_size)
    start_s = time.perf_counter()
    progress(0, total, 0.0)
    for done, micro_batch in enumerate(batches.micro_batches(ranks.rank, ranks.world_size)):
        if stop_requested(done == 0):
            return None
        result = engine.evaluate(micro_batch)
        if objective is not None and objective.rates_answers:
            ratios += mismatched_ratios(engine, micro_batch)
        if micro_batch is not None and isinstance(micro_batch.row_loss, RatedAnswers):
            # Their loss depends on the divergence of the whole set. The tokens are not needed any more.
            rated.append(micro_batch.row_loss.without_tokens(result))
        else:
            add_metrics(sums, (micro_batch or MicroBatch.empty()).metrics(result))
        progress(done + 1, total, time.perf_counter() - start_s)
    divergence = max(0.0, math.fsum(ranks.gather(ratios)) / batches.predicted)
    for answers, result in rated:
        add_metrics(sums, replace(answers, divergence=divergence).metrics(result))
    gathered = ranks.gather(sums)
    names = dict.fromkeys(name for rank_sums in gathered for name in rank_sums)
    totals = {name: math.fsum(rank_sums[name] for rank_sums in gathered if name in rank_sums) for name in names}
    if objective is not None:
        return objective.means(totals, batches.predicted)
    metrics = {name: value / batches.predicted for name, value in totals.items()}
    metrics["perplexity"] = math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf
    if batches.store.text_bytes:
        metrics["bits_per_byte"] = totals["loss"] / math.log(2) / batches.store.text_bytes
    return metrics


def mismatched_ratios(engine: Engine, micro_batch: MicroBatch | None) -> float:
    """Return the summed log-ratios of the mismatched answers of a micro-batch, for KTO's divergence. Collective.

    A rank without answers runs the same number of forward passes as the other ranks.
    """
    mismatched = micro_batch and micro_batch.mismatched
    result = engine.evaluate(mismatched or micro_batch)
    answers = None if mismatched is None else mismatched.row_loss
    return answers.summed_ratios(result) if isinstance(answers, Answers) else 0.0


def add_metrics(sums: dict[str, float], values: Mapping[str, float]) -> None:
    """Add `values` to `sums`, by name."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


class Evaluator:
    """The evaluations during a run. Every method is a collective."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.metrics: Mapping[str, Any] = {}

    @property
    def is_due(self) -> bool:
        """Whether the `train` section asks for an evaluation after the last finished step."""
        settings, progress = self._trainer.config.train, self._trainer.progress
        if progress.step == 0:
            return settings.eval_on_start
        return progress.step == progress.last_step or is_due(settings.eval_steps, progress.step)

    def compile(self) -> None:
        """With train.compile, compile the evaluation for every length of packed sequences."""
        trainer, ranks = self._trainer, self._trainer.ranks
        if trainer.config.train.compile != "layers" or not trainer.held_out:
            return
        trainer.display.line("compiling the evaluation before the second step")
        trainer.activity.enter("compiling the evaluation")
        for batches in trainer.held_out.values():
            for micro_batch in batches.first_and_last(ranks.rank, ranks.world_size):
                trainer.model.engine.evaluate(micro_batch)
            self._trainer.watchdog.beat()

    def evaluate(self) -> int:
        """Evaluate on every set, and compare the first set's metric with the best evaluation.

        Returns the stop signal for which the evaluation was given up, or 0. `metrics` holds the metrics.
        """
        trainer, ranks = self._trainer, self._trainer.ranks
        if not trainer.held_out:
            return 0
        trainer.activity.enter("evaluating")
        total, done_before = sum(batches.count(ranks.world_size) for batches in trainer.held_out.values()), 0

        def progress(done: int, *_: float) -> None:
            trainer.watchdog.beat()
            trainer.recorder.evaluating(done_before + done, total)

        results = {}
        for name, batches in trainer.held_out.items():
            result = evaluate(trainer.model.engine, batches, ranks, progress, trainer.stop_poll)
            if result is None:
                return trainer.stop_poll.now()
            results[name] = result
            done_before += batches.count(ranks.world_size)
        self.metrics = trainer.recorder.evaluated(results)
        trainer.progress.perplexity = results.get("", next(iter(results.values()))).get("perplexity")
        # The allocator holds blocks of the evaluation's sizes, which would fragment the memory of the steps.
        trainer.memory_release.release(trainer.progress.step)
        if trainer.progress.step > 0:
            self._compare(next(iter(results.values()))[trainer.progress.evaluations.metric])
        trainer.callbacks.call("on_evaluate", self.metrics)
        return 0

    def _compare(self, value: float) -> None:
        """Add the evaluation to the history, and end training at this step if early stopping asks for it."""
        settings, progress = self._trainer.config.train, self._trainer.progress
        progress.evaluations = progress.evaluations.after(progress.step, value, settings.early_stopping_threshold)
        if progress.evaluations.exhausts(settings.early_stopping_patience):
            progress.end_early(progress.evaluations.summary(), self._trainer.recorder)


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate_model` on one evaluation set.

    Attributes:
        loss: The mean cross-entropy of the predicted tokens, in nats per token; with a preference objective, the mean
            loss of a pair or of a rated answer.
        perplexity: The exponential of the loss. None with a preference objective.
        bits_per_byte: Bits of loss per byte of UTF-8 text, which compares models with different tokenizers. None if the
            size of the text is unknown, as for chats.
        predicted_tokens: The number of tokens that the model predicted; with a preference objective, of pairs or rated
            answers.
        documents: The number of documents.
        sequence_length: The longest context, in tokens.
        ranks: The number of ranks that computed the result.
        preferences: The mean of each of TRL's metrics, for example `rewards/accuracies`; empty without a preference
            objective.
    """

    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    predicted_tokens: int
    documents: int
    sequence_length: int
    ranks: int
    preferences: Mapping[str, float] = field(default_factory=dict)


def evaluate_model(config: RunConfig) -> dict[str, Evaluation]:
    """Evaluate a model on each evaluation set of `config`, without a run directory.

    Like `train`, this function runs as one rank and starts no other ranks. The engine reserves as much address
    space as for training, but uses memory only for weights and activations.

    Args:
        config: from `read_evaluation_config`; the same on every rank.

    Returns:
        The results by the name of the evaluation set, the same on every rank. A single set may have the name "".

    Raises:
        UserError: on every rank, for bad input.
    """
    from aliquot.run.prepared_run import PreparedRun

    with PreparedRun(config, trains=False) as trainer:
        ranks, display, run, model = trainer.ranks, trainer.display, trainer.resolved, trainer.model
        facts = (f"{model.built.numel:,} parameters", run.config.train.chosen_precision, f"engine {model.engine_name}")
        display.line(", ".join((model.built.name, *facts)))
        display.line(trainer.placement)
        for name, batches in run.held_out.items():
            for line in irregularities(batches.store):
                display.line(f"{name}: {line}" if name else line)
        results = {}
        for name, batches in run.held_out.items():
            result = evaluate(model.engine, batches, ranks, display.evaluating, stop_requested=lambda _: 0)
            assert result is not None  # because nothing stops the evaluation
            loss, perplexity, bits = (
                result.pop("loss"),
                result.pop("perplexity", None),
                result.pop("bits_per_byte", None),
            )
            length, documents = batches.format.length, batches.store.documents
            results[name] = Evaluation(
                loss, perplexity, bits, batches.predicted, documents, length, ranks.world_size, preferences=result
            )
        return results
