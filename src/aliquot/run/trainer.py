"""The training loop of a run, for `aliquot train` and for loops, losses and data of the caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from aliquot.config.schema import RunConfig
from aliquot.core.errors import CallbackError, UsageError
from aliquot.core.on_rank_0 import run_on_rank_0
from aliquot.data.batches import StepBatch
from aliquot.distributed.liveness.liveness import StepWatchdog
from aliquot.losses import cross_entropy
from aliquot.machine.allocator import PeriodicRelease
from aliquot.nn.token_loss import Group, LossFunction, TokenSequence
from aliquot.observe.metrics import last_point
from aliquot.observe.recorder import RecordedRun, Recorder
from aliquot.planner.compute_ceiling import ceiling
from aliquot.run.built_model import files_beside_weights
from aliquot.run.callbacks import Callback, Callbacks
from aliquot.run.caller_batch import as_groups, lay_out, scattered, token_logprobs
from aliquot.run.export_run import finish_run, is_exported
from aliquot.run.prepared_run import PreparedRun
from aliquot.run.run_checkpoints import RunCheckpoints, start_uploads
from aliquot.run.sampling import Drawing, Sample, sample_all
from aliquot.run.shutdown import StopPoll
from aliquot.run.starting_point import continuation_advice
from aliquot.run.training_loop import TrainingLoop


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        directory: The run directory.
        steps: The number of finished optimizer steps, including the steps of earlier starts of this run.
        loss: The training loss of the last step, in nats per token; the last logged loss if the run was complete. None
            if no loss is known.
        perplexity: The perplexity of the last evaluation. None without an evaluation.
        export: The directory of the exported model. None if `checkpoint.export` is false.
    """

    directory: Path
    steps: int
    loss: float | None
    perplexity: float | None
    export: Path | None


@dataclass(frozen=True)
class OptimizerStep:
    """The outcome of `Trainer.optim_step`.

    Attributes:
        grad_norm: The norm of the gradient of all weights, before clipping.
        learning_rate: The learning rate of the step.
    """

    grad_norm: float
    learning_rate: float


def train(config: RunConfig, force: bool = False, callbacks: Sequence[Callback] = ()) -> Result:
    """Train a model in this process, and return the result of the run.

    This process is one rank: the only rank, or one of many if torchrun has started the script. The function starts no
    other ranks, so `launch.ranks` and `launch.nodes` have no effect. Every rank calls the function with the same
    config, from the main thread. A run that has checkpoints in its run directory continues after the newest one.

    Args:
        config: the run configuration.
        force: train even if the plan says that the run does not fit into memory.
        callbacks: called on rank 0 after steps, log lines, evaluations and saves.

    Raises:
        UserError: on every rank, for bad input, or if a callback fails.
        TrainingError: a run with good input had to stop, for example after a stop signal (`Terminated`).
    """
    with _ConfiguredRun(config, force, callbacks) as run:
        return run.run()


class Trainer(PreparedRun):
    """A run whose training loop is yours: batches, losses and samples between its optimizer steps.

    ```python
    with aliquot.Trainer(config) as trainer:
        for batch in trainer.batches():
            trainer.forward_backward(batch)
            trainer.optim_step()
        trainer.export()
    ```

    Entering the context joins the other ranks, plans the run, and builds and loads or resumes the model. The process is
    one rank, as for `train`. Every method is a collective: all ranks call the same methods in the same order, and every
    rank raises an error that any rank raises in a method. An error of yours between two methods ends its rank, and the
    other ranks then lose their connection. `ranks.rank` is the number of this rank, from 0.

    Args:
        config: the run configuration, the same on every rank.
        force: train even if the plan says that the run does not fit into memory.
        callbacks: called on rank 0 after steps, log lines, evaluations and saves.

    Attributes:
        state: Values of yours that checkpoints hold and a resumed run gets back: a dict of JSON, at first empty. A
            checkpoint has rank 0's values as they are at the end of the step.

    Raises:
        UserError: on every rank, for bad input, or if a function of yours fails.
        TrainingError: a run with good input had to stop, for example after a stop signal (`Terminated`).
    """

    has_own_loop = True

    def __init__(self, config: RunConfig, force: bool = False, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__(config, force, callbacks)
        self.initial_weights: list[Tensor] | None = None  # this rank's shards; None: not needed so far

    def __exit__(self, *error: Any) -> None:
        if isinstance(error[1], CallbackError):  # the same on all ranks; the weights in the save in progress are good
            self.checkpoints.finish()
        super().__exit__(*error)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model, from transformers."""
        return self.resolved.tokenizer

    def steps(self) -> Iterator[int]:
        """Yield the number of each optimizer step that is left, counted from 0, for a loop with data of your own.

        Before and after each step, evaluate, log and save as the configuration says; saves go on while the next steps
        compute, so that a killed run may repeat a finished step. A stop signal ends the run after the step, or between
        two micro-batches.

        Raises:
            UserError: a step ended without `optim_step`; `state` is not JSON when a checkpoint is saved.
            Terminated: a rank has received a stop signal, and the run has saved.
        """
        return self._loop.steps()

    def batches(self) -> Iterator[StepBatch]:
        """Yield the batch of the configured data for each optimizer step that is left, as `steps` does.

        A batch is this rank's part of the global batch, for `forward_backward` with the configured objective. A loss of
        yours takes sequences, and `steps` counts its steps.
        """
        return self._loop.batches()

    def forward_backward(
        self,
        batch: StepBatch | Sequence[TokenSequence | Group],
        loss: LossFunction | None = None,
        divisor: float | None = None,
        accumulate: bool = False,
        scatter: bool = False,
    ) -> float:
        """Add the gradient of a loss, and return the loss: the sum over all ranks, over `divisor`.

        Args:
            batch: from `batches`, for the configured objective; or sequences for a loss of yours, this rank's part of
                the global batch. A tuple of sequences has a common loss, for example a pair of answers.
            loss: called with the log-probabilities of a sequence's learned tokens (fp32 [L], on CPU) and the sequence;
                for tuples, with tuples of both. A parameter `entropies` gets the entropies of the distributions from
                which the tokens come (fp32 [L]). Returns a scalar, a sum and not a mean. Autograd computes the
                gradient through it. Default: the cross-entropy of the learned tokens.
            divisor: of the summed loss, the same on all ranks. Default: the number of learned tokens of all ranks.
            accumulate: another call for the same optimizer step follows.
            scatter: take rank 0's sequences, and divide them among the ranks by their tokens.

        Raises:
            UserError: no rank has a sequence; a sequence is longer than `data.sequence_length`, or has an id outside of
                the vocabulary; ranks differ in `divisor` or `loss`; the call is outside of a step, or follows the last
                one; `loss` fails, or its value is no finite scalar with a gradient. The message names the line of
                `loss`. The loss and the errors are the same on all ranks.
        """
        names: tuple[str, ...] = ()
        if isinstance(batch, StepBatch):
            if loss is not None or divisor is not None or scatter:
                raise UsageError("loss, divisor and scatter are for sequences, not for a batch of the configured data")
            step_batch, names = self._loop.with_divergence(batch), self.train_batches.names
        else:
            groups = as_groups(batch)
            if scatter:
                groups, indices = scattered(self, groups)
                groups = [groups[index] for index in indices]
            step_batch = lay_out(self, groups, loss or cross_entropy, divisor)
        return self._loop.forward_backward(step_batch, names, not accumulate)

    def optim_step(self, learning_rate: float | None = None) -> OptimizerStep:
        """Clip the gradient, update the weights with AdamW, and set the gradient to 0.

        Args:
            learning_rate: of this step. Default: the rate of the configured schedule.

        Raises:
            UserError: there is no gradient, or the last `forward_backward` said `accumulate` or failed.
            TrainingError: the norm of the gradient is not finite (`[diverged]`).
        """
        return OptimizerStep(*self._loop.update(learning_rate))

    def forward(
        self, sequences: Sequence[TokenSequence], reference: bool = False, scatter: bool = False
    ) -> list[Tensor]:
        """Return the log-probabilities of the learned tokens of each sequence, fp32 [L] on CPU, without gradients.

        They can be an array of a `TokenSequence` as they are.

        Args:
            sequences: this rank's sequences.
            reference: compute with the weights before training, which the first such call loads again. Each rank then
                keeps its shard of them, in fp32.
            scatter: take rank 0's sequences, divide them among the ranks, and return the results of all on every rank.

        Raises:
            UserError: a sequence is longer than `data.sequence_length`, or has an id outside of the vocabulary.
        """
        self._loop.recorder.enter("forward")
        return token_logprobs(self, as_groups(sequences), reference, scatter)

    def sample(
        self,
        prompts: Sequence[str | Sequence[int]],
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 100,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[Sample]:
        """Continue prompts with the weights as they train; return `n` samples of each prompt, in order, on every rank.

        Ranks divide the work. A sample depends on the seed, its prompt's index and its own index, not on the ranks,
        apart from rounding: a difference in the last bits of bf16 may change a drawn token, and so the rest of a text.

        Args:
            prompts: texts, or token ids; the same on every rank. Texts become token ids as documents do, without a
                chat template.
            n: samples of each prompt.
            temperature: 0 draws the most likely token; 1 draws from the model's distribution.
            top_p: draw from the smallest set of the most likely tokens with this probability.
            max_tokens: the most tokens of a continuation.
            stop: texts after which a continuation ends, besides the tokenizer's end token.
            seed: of all samples, with `run.seed`. For other samples in each step, use another seed in each step.

        Raises:
            UserError: an argument is out of range, or prompt and `max_tokens` exceed the model's context.
        """
        drawing = Drawing(temperature, top_p, max_tokens, tuple(stop))
        self._loop.recorder.enter("forward")
        return sample_all(self, prompts, n, drawing, seed, self._loop.stop_if_requested)

    def log(self, **values: float) -> None:
        """Add values to the metrics of the present step, for the console, metrics.jsonl and dashboards.

        They are logged with the step, every `train.logging_steps`. Rank 0's values count.
        """
        if reserved := values.keys() & {"step", "loss", "learning_rate", "grad_norm", "tokens", "epoch", "engine"}:
            raise UsageError(f"log: {min(reserved)} is a metric of every run: choose another name")
        self._loop.caller_metrics |= {name: float(value) for name, value in values.items()}

    def evaluate(self) -> Mapping[str, float]:
        """Evaluate on the configured evaluation sets now; return the metrics, under their names in metrics.jsonl.

        The first set has `eval_loss`, in nats per token, and `eval_perplexity`. Without a set, there are no metrics.
        """
        return self._loop.evaluate_now()

    def save(self) -> None:
        """Save a checkpoint of the last finished step, and wait until it is complete."""
        self._loop.save_now()

    def export(self) -> Path | None:
        """End the run: export as `checkpoint.export` says, print the summary, and return the directory of the export.

        Returns None if `checkpoint.export` is false. Without this call, a run leaves its checkpoints alone.
        """
        self._loop.checkpoints.finish()
        return finish_run(self)

    @cached_property
    def _loop(self) -> TrainingLoop:
        """Open what records the steps, and return the loop. The context of this trainer closes it."""
        config, start, ranks = self.config, self.start, self.ranks
        self.files = files_beside_weights(self.resolved, self.model)
        self.memory_release = PeriodicRelease(start.step)
        recorder = Recorder(
            RecordedRun(config, self.directory, ranks, self.display, self.exporter, self.record, self.ledger.gpu),
            self.model.clock, lambda: ceiling(ranks, config.train.chosen_precision, again=True).flops_per_s,
            steps_before=start.step, total_steps=self.total_steps,
        )  # fmt: skip
        self.recorder = self._stack.enter_context(recorder)
        stack_file = self.directory.logs / f"stacks-rank-{ranks.rank}.txt"
        self.watchdog = self._stack.enter_context(StepWatchdog(self.liveness.rank, stack_file))
        self.shutdown.on_request = self.watchdog.hurry
        self.stop_poll = StopPoll(ranks, self.shutdown, self.watchdog.relax)
        self.callbacks = Callbacks(self, self._user_callbacks)
        self.checkpoints = RunCheckpoints(self)
        return TrainingLoop(self)


class _ConfiguredRun(Trainer):
    """A run whose loop is that of its configuration."""

    has_own_loop = False

    def run(self) -> Result:
        """Train the steps that are left as the configuration says, then export; return the result of the run."""
        start, config, progress = self.start, self.config, self.progress
        if advice := continuation_advice(self):
            self.display.line(f"this run is complete at step {start.step}: {advice}, or choose another run.name")
            uploader = start_uploads(self, self.display.warning)
            self.activity.enter("copying checkpoints to the mirror")
            uploader.finish()
            progress.loss, progress.perplexity = run_on_rank_0(self.ranks, self._logged)
            is_evaluated = not self.held_out or start.evaluations.last_step == start.step
            if is_evaluated and (not config.checkpoint.export or is_exported(self)):
                return self._result(self.directory.export if config.checkpoint.export else None)
            self.total_steps = progress.last_step = start.step  # only the evaluation or the export is left
        for batch in self.batches():
            self.forward_backward(batch)
            self.optim_step()
            self.recorder.compare_with_plan()
        return self._result(self.export())

    def _logged(self) -> list[float | None]:
        """Return the last loss and perplexity that an earlier start of this run has logged."""
        name = next(iter(self.held_out), "")
        return [
            last_point(self.directory.metrics, metric)[1]
            for metric in ("loss", f"eval_{name}_perplexity" if name else "eval_perplexity")
        ]

    def _result(self, exported: Path | None) -> Result:
        progress = self.progress
        return Result(self.directory.path, progress.step, progress.loss, progress.perplexity, exported)
