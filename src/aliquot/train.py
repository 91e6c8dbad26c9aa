"""The story of a run, top to bottom: join the ranks, read the data, build and fill the model, train, save, export."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aliquot.checkpoint.directories import newest
from aliquot.checkpoint.resume import changes, check_continuity, resume
from aliquot.checkpoint.saver import Saver
from aliquot.config.batch_size import BatchSize, batch_size
from aliquot.config.schema import RunConfig
from aliquot.data.batches import Batches, EvalBatches
from aliquot.data.prepare import Prepared, prepare_together
from aliquot.engines.base import Engine, EngineSpec
from aliquot.engines.select import engine_class
from aliquot.errors import TrainingError
from aliquot.machine.cpu import read_cpu
from aliquot.machine.device import choose_device
from aliquot.machine.facts import machine_facts
from aliquot.machine.launch import torchrun_advice
from aliquot.machine.matmul import matmul_rate
from aliquot.machine.memory import memory_use
from aliquot.machine.placement import place
from aliquot.machine.ranks import Ranks
from aliquot.machine.stop import StopSignal, Terminated
from aliquot.machine.watchdog import Watchdog
from aliquot.models import initialize, meta
from aliquot.models.export import export
from aliquot.models.files import export_dtype, model_files
from aliquot.models.generate import continuation
from aliquot.models.load import load_weights
from aliquot.models.source import ModelSource, resolve
from aliquot.observe import summary
from aliquot.observe.console import Display
from aliquot.observe.flops import model_flops
from aliquot.observe.ledger import STEADY_PEAK, Ledger
from aliquot.observe.meter import Meter
from aliquot.observe.metrics import Curve
from aliquot.observe.run_directory import RunDirectory
from aliquot.optim.schedule import learning_rate, warmup
from aliquot.ranges.publish import remove_directory
from aliquot.ranges.together import on_first

# Only training steps are on the watchdog's clock: reading data and weights may take long. A rank that dies ends the
# run at once anyway; this only bounds the wait for one that hangs.
_PREPARATION_TIMEOUT_S = 24 * 3600.0


@dataclass(frozen=True)
class Result:
    """How a run ended: the last step's training loss and the final perplexity, None where there was nothing to do."""

    directory: Path
    steps: int
    loss: float | None
    perplexity: float | None
    export: Path | None


@dataclass
class _Run:
    """Everything a run consists of once it is ready to train."""

    config: RunConfig
    ranks: Ranks
    directory: RunDirectory
    display: Display
    ledger: Ledger
    machine: dict[str, Any]
    source: ModelSource
    files: dict[str, bytes]  # config and tokenizer, to lie beside saved weights
    data: Prepared
    size: BatchSize
    batches: Batches
    total_steps: int
    built: meta.MetaModel
    engine: Engine
    saver: Saver
    steps_before: int  # optimizer steps and real tokens of the runs that this one continues
    tokens_before: int


def train(config: RunConfig) -> Result:
    """Train as this process's rank: alone, or one of many where torchrun's variables are set.

    Every rank calls it with the same config. Raises UserError for bad input, TrainingError for a run that must stop.
    """
    topology, placement = place(config.launch, os.environ, read_cpu(), choose_device(config.launch.device))
    machine = machine_facts()
    ranks = Ranks.join(topology, _PREPARATION_TIMEOUT_S)
    display = Display(config.observe.console, enabled=topology.is_first)
    try:
        with RunDirectory(config.run.directory).locked() if topology.is_first else nullcontext():
            result = _train(_prepare(config, ranks, display, machine, placement))
    except BaseException:
        if ranks.world_size == 1:
            ranks.close()  # with peers, what ended this rank must be told before they see the connection go
        raise
    finally:
        display.finish()
    ranks.close()
    return result


def _prepare(config: RunConfig, ranks: Ranks, display: Display, machine: dict[str, Any], placement: str) -> _Run:
    ledger = Ledger(ranks.rank)
    ledger.mark("process start", {})
    directory = RunDirectory(config.run.directory)
    on_first(ranks, lambda: directory.check(config))
    on_first(ranks, lambda: bool(resolve(config.model)))  # from the hub only rank 0 downloads
    source = resolve(config.model)
    data = prepare_together(config.data, source.directory, source.largest_vocabulary, ranks, display.progress)
    tokenizer = data.load_tokenizer()
    source.adopt_tokenizer(tokenizer)
    source.check_length(config.data.sequence_length)
    size = batch_size(config.train, ranks.world_size)
    epochs = None if config.train.max_steps else config.train.num_train_epochs
    batches = Batches.of(data, config.data, config.run.seed, size, epochs)
    total_steps = config.train.max_steps or batches.steps_in(config.train.num_train_epochs)

    built = meta.build(source.config)
    engine_name, engine_type = engine_class(config, ranks.topology, built.numel)
    phase = lambda name: ledger.mark(f"first {name}", engine.counters().memory())  # noqa: E731
    spec = EngineSpec.of(config, ranks.topology, built.plain_head, phase)
    engine: Engine = engine_type.build(built.model, spec, ranks.topology)
    ledger.mark("model built", engine.counters().memory())

    resumed = resume(config.checkpoint, directory.checkpoints, engine, built.tensors, ranks)
    if resumed is not None:
        where, state = resumed
        check_continuity(state, batches.determinants(), vars(batches.position(state["step"])), where)
        engine.restored(state["step"])
        display.line(f"resuming from {where}")
        for change in changes(state, config.model_dump(mode="json", by_alias=True)):
            display.line(f"changed since: {change}")
    elif source.directory is not None:
        load_weights(engine, source.directory, built.tensors, built.tied, ranks)
    else:
        initialize.initialize(engine, built.fills, config.run.seed)
    ledger.mark("weights loaded", engine.counters().memory())
    on_first(ranks, lambda: directory.begin(config))
    engine.ready()
    ledger.mark("optimizer state", engine.counters().memory())

    packed = "packed" if config.data.packing else "padded"
    display.header(
        f"{built.name}, {built.numel:,} parameters, {config.train.precision}, engine {engine_name}",
        f"{placement}; {machine['matmul_kernels'][config.train.precision]}, {machine['allocator']}",
        f"{batches.store.documents:,} documents, {len(batches.store.tokens):,} tokens; {total_steps} steps of"
        f" {size.total} sequences of {config.data.sequence_length}, {packed}",
    )
    if advice := torchrun_advice(os.environ, config.checkpoint.grace_s):
        display.line(advice)
    before = (state["step"], state["tokens"]) if resumed is not None else (0, 0)
    files = model_files(source.config, tokenizer, source.directory)
    saver = Saver(directory.checkpoints, engine, built.tensors, files, ranks, config.checkpoint, display.warning)
    return _Run(
        config, ranks, directory, display, ledger, machine, source, files, data, size, batches, total_steps, built,
        engine, saver, *before,
    )  # fmt: skip


def _train(run: _Run) -> Result:
    timeout_s, stacks = run.config.launch.step_timeout_s, run.directory.logs / f"stacks-rank-{run.ranks.rank}.txt"
    with StopSignal(run.config.checkpoint.grace_s) as stop, Watchdog(timeout_s, stacks, run.ranks.rank) as watchdog:
        return _steps(run, stop, watchdog)


def _steps(run: _Run, stop: StopSignal, watchdog: Watchdog) -> Result:
    config, ranks, engine, settings = run.config, run.ranks, run.engine, run.config.train
    meter = Meter(ceiling_flops_per_s=sum(ranks.gather(matmul_rate(ranks, settings.precision))))
    curve = Curve(run.directory, config.observe, run.steps_before, run.total_steps, enabled=ranks.rank == 0)
    warmup_steps = warmup(settings.warmup_steps, settings.warmup_ratio, run.total_steps)
    attention_width = meta.attention_width(run.source.config)
    matmul_parameters = meta.matmul_parameters(run.built.model)
    tokens, loss, perplexity, done = run.tokens_before, None, None, run.steps_before
    if done >= run.total_steps:
        run.display.line(f"this run is complete at step {done}: raise train.max_steps, or choose another run.name")
        if run.directory.export.exists() or not config.checkpoint.export:
            return Result(run.directory.path, done, None, None, run.directory.export)

    for step in range(run.steps_before, run.total_steps):
        meter.begin()
        batch = run.batches.step_batch(step, ranks.rank, ranks.world_size)
        summed = torch.zeros((), dtype=torch.float64)
        for index, micro_batch in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            summed += engine.backward(micro_batch, 1 / max(1, batch.predicted), last).cpu()
        done = step + 1
        reports = ranks.gather({"loss": float(summed), "stop": stop.requested, "save": run.saver.report()})
        loss = _mean_loss(run, [report["loss"] for report in reports], batch.predicted, done)
        stopping = any(report["stop"] for report in reports)
        run.saver.poll([report["save"] for report in reports])
        run.saver.before_update()
        rate = learning_rate(step, run.total_steps, warmup_steps, settings.learning_rate, settings.lr_scheduler_type)
        grad_norm = engine.step(rate, settings.max_grad_norm or None).grad_norm
        if not math.isfinite(grad_norm):
            raise _stopped(run, done, f"the gradient norm is {grad_norm}")
        tokens += batch.tokens
        meter.end(batch.tokens, model_flops(matmul_parameters, batch.tokens, batch.attention_pairs, attention_width))
        run.ledger.mark("first step", engine.counters().memory())
        watchdog.beat()

        if done % settings.logging_steps == 0 or done in (run.steps_before + 1, run.total_steps):
            metrics = {
                "step": done,
                "loss": loss,
                "learning_rate": rate,
                "grad_norm": grad_norm,
                "tokens": tokens,
                "epoch": batch.epoch,
                **engine.counters().traffic(),
                **meter.readings(steps_left=run.total_steps - done),
                "memory_bytes": ranks.gather(memory_use().private_bytes),
            }
            curve.write(metrics)
            run.display.step(metrics, run.total_steps)
        if done == run.total_steps or (settings.eval_steps and done % settings.eval_steps == 0):
            perplexity = _evaluate(run, done, curve, watchdog)
        due = config.checkpoint.every and done % config.checkpoint.every == 0
        if due or stopping or done == run.total_steps:
            run.saver.start(done, _state(run, done, tokens))
        if stopping and done < run.total_steps:
            run.saver.finish()
            raise Terminated(f"stopped by SIGTERM after step {done}, which is saved: start again to continue")

    watchdog.stop()
    run.saver.finish()
    run.ledger.mark(STEADY_PEAK, engine.counters().memory())
    curve.close()
    exported = _export(run) if config.checkpoint.export else None
    sample = None
    if (prompt := config.observe.sample_prompt) is not None:
        sample = continuation(engine.generate, run.data.load_tokenizer(), prompt, config.observe.sample_tokens)
    rows = [row for of_rank in ranks.gather(run.ledger.rows()) for row in of_rank]
    if ranks.rank == 0:
        summary.finish(run.display, run.directory, rows, run.machine, meter.overall(), sample, exported)
    engine.close()
    return Result(run.directory.path, done, loss, perplexity, exported)


def _mean_loss(run: _Run, sums: list[float], predicted: int, step: int) -> float:
    """The loss of the global batch: the mean over all of its predicted tokens. A non-finite one ends the run."""
    bad = [str(rank) for rank, value in enumerate(sums) if not math.isfinite(value)]
    if bad:
        raise _stopped(run, step, f"the loss is not finite on rank {', '.join(bad)}")
    return math.fsum(sums) / max(1, predicted)


def _stopped(run: _Run, step: int, reason: str) -> TrainingError:
    """Why the run ends, on every rank at once; a checkpoint that is being saved is good and is finished first."""
    run.saver.finish()
    kept = newest(run.directory.checkpoints)
    where = f"the last checkpoint is {kept}" if kept else "there is no checkpoint yet"
    return TrainingError(f"step {step}: {reason}; {where}. Try a lower train.learning_rate or more warm-up")


def _evaluate(run: _Run, step: int, curve: Curve, watchdog: Watchdog) -> float | None:
    """Perplexity per predicted token over all evaluation documents; None where there are none."""
    batches = EvalBatches.of(run.data, run.config.data, run.size)
    if batches is None:
        return None
    summed = torch.zeros((), dtype=torch.float64)
    for micro_batch in batches.micro_batches(run.ranks.rank, run.ranks.world_size):
        summed += run.engine.evaluate(micro_batch).cpu()
        watchdog.beat()
    loss = math.fsum(run.ranks.gather(float(summed))) / batches.predicted
    perplexity = math.exp(loss) if loss < 700 else math.inf
    curve.write({"step": step, "eval_loss": loss, "eval_perplexity": perplexity})
    run.display.line(f"step {step}: evaluation loss {loss:.4f}, perplexity {perplexity:.2f}")
    return perplexity


def _state(run: _Run, step: int, tokens: int) -> dict[str, Any]:
    """What a checkpoint holds beside weights and moments."""
    return {
        "step": step,
        "tokens": tokens,
        "position": vars(run.batches.position(step)),
        # Every draw is made from (seed, name or epoch): the seed is all the state that randomness has.
        "rng": {"seed": run.config.run.seed},
        "determinants": run.batches.determinants(),
        "config": run.config.model_dump(mode="json", by_alias=True),
    }


def _export(run: _Run) -> Path:
    target = run.directory.export  # an export of an earlier stage of this run is replaced
    on_first(run.ranks, lambda: remove_directory(target) if target.exists() else None)
    dtype = export_dtype(run.config.model.dtype, run.source.dtype, run.config.train.precision)
    export(run.engine, run.built.tensors, target, dtype, run.files, run.ranks)
    return target
