"""The story of a run, top to bottom: join the ranks, read the data, build and fill the model, train, save, export."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aliquot.checkpoint.directories import newest
from aliquot.checkpoint.resume import changes, check_continuity, resume
from aliquot.checkpoint.saver import Saver
from aliquot.config.batch_size import BatchSize, batch_size
from aliquot.config.schema import RunConfig
from aliquot.data.batches import Batches
from aliquot.data.prepare import Prepared, prepare_together
from aliquot.engines.base import Engine, EngineSpec
from aliquot.engines.connections import group_lines
from aliquot.engines.select import engine_class
from aliquot.errors import DivergedError, TrainingError
from aliquot.evaluate import evaluate
from aliquot.launch.device import choose_device
from aliquot.launch.launcher import torchrun_advice
from aliquot.launch.placement import place
from aliquot.launch.ranks import Ranks
from aliquot.launch.stop_signal import StopSignal, Terminated
from aliquot.launch.watchdog import Watchdog
from aliquot.machine.cpu import read_cpu
from aliquot.machine.facts import machine_facts
from aliquot.machine.matmul import matmul_rate
from aliquot.models import initialize, meta
from aliquot.models.export import export
from aliquot.models.generate import continuation
from aliquot.models.load import load_weights
from aliquot.models.model_files import export_dtype, model_files
from aliquot.models.source import ModelSource, resolve
from aliquot.observe import summary
from aliquot.observe.clock import StepClock
from aliquot.observe.console import Display
from aliquot.observe.flops import model_flops
from aliquot.observe.ledger import STEADY_PEAK, Ledger
from aliquot.observe.prometheus import Exporter
from aliquot.observe.recorder import Recorder
from aliquot.observe.run_directory import RunDirectory
from aliquot.optim.schedule import learning_rate, warmup
from aliquot.plan.before import plan_before
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
    about: dict[str, Any]  # model, engine, machine, placement: what this attempt is made of
    source: ModelSource
    files: dict[str, bytes]  # config and tokenizer, to lie beside saved weights
    data: Prepared
    size: BatchSize
    batches: Batches
    total_steps: int
    built: meta.MetaModel
    engine: Engine
    saver: Saver
    record: Recorder
    tokens_before: int  # real tokens and optimizer steps of the runs that this one continues
    steps_before: int


def train(config: RunConfig, force: bool = False) -> Result:
    """Train as this process's rank: alone, or one of many where torchrun's variables are set.

    Every rank calls it with the same config. `force`: even if the plan says that it does not fit. Raises UserError for
    bad input, TrainingError for a run that must stop.
    """
    topology, placement = place(config.launch, os.environ, read_cpu(), choose_device(config.launch.device))
    machine = machine_facts() if topology.is_first else None
    ranks = Ranks.join(topology, _PREPARATION_TIMEOUT_S, config.launch.join_timeout_s)
    display = Display(config.observe.console, enabled=topology.is_first)
    exporter = Exporter(config.observe, config.run.name)
    try:
        with RunDirectory(config.run.directory).locked() if topology.is_first else nullcontext():
            on_first(ranks, exporter.listen)
            about = {"placement": placement, "machine": ranks.broadcast(machine)}
            result = _train(_prepare(config, ranks, display, exporter, about, force))
    except BaseException:
        if ranks.world_size == 1:
            ranks.close()  # with peers, what ended this rank must be told before they see the connection go
        raise
    finally:
        display.finish()
        exporter.close()
    ranks.close()
    return result


def _prepare(
    config: RunConfig, ranks: Ranks, display: Display, exporter: Exporter, about: dict[str, Any], force: bool
) -> _Run:
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

    plan = partial(plan_before, config, ranks.topology, ranks.allowed_cores, batches.workload())
    ledger.plan = on_first(ranks, lambda: plan(source.config.vocab_size, force, display.warning))
    built = meta.build(source.config)
    engine_name, engine_type = engine_class(config, ranks.topology, built.numel)
    clock = StepClock(lambda: engine.counters().inside_s())

    def phase(name: str) -> None:
        ledger.mark(f"first {name}", lambda: engine.counters().memory())
        clock.ended(name)

    spec = EngineSpec.of(config, ranks.topology, engine_name, built, phase, lambda name: ledger.mark(name, {}))
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

    ceiling = sum(ranks.gather(matmul_rate(ranks.topology.device, config.train.precision, ranks.barrier)))
    about |= {
        "resumed_from": str(where) if resumed is not None else None, "model": built.name, "parameters": built.numel,
        "engine": engine_name, "ceiling_flops_per_s": ceiling, "plan": ledger.plan,
    }  # fmt: skip
    notes = (*spec.notes, *torchrun_advice(os.environ, config.checkpoint.grace_s))
    summary.begin(display, config, about, batches.described(total_steps), *group_lines(ranks, engine.transport), *notes)
    tokens_before, steps_before = (state["tokens"], state["step"]) if resumed is not None else (0, 0)
    record = Recorder(config, directory, ranks, display, clock, exporter, about, steps_before, total_steps)
    files = model_files(source.config, tokenizer, source.directory)
    saving = (config.checkpoint, record.warn, record.saved)
    saver = Saver(directory.checkpoints, engine, built.tensors, files, ranks, *saving)
    return _Run(
        config, ranks, directory, display, ledger, about, source, files, data, size, batches, total_steps, built,
        engine, saver, record, tokens_before, steps_before,
    )  # fmt: skip


def _train(run: _Run) -> Result:
    config, directory, done = run.config, run.directory, run.steps_before
    if done >= run.total_steps:
        run.display.line(f"this run is complete at step {done}: raise train.max_steps, or choose another run.name")
        if directory.export.exists() or not config.checkpoint.export:
            return Result(directory.path, done, None, None, directory.export)
    timeout_s, stacks = config.launch.step_timeout_s, directory.logs / f"stacks-rank-{run.ranks.rank}.txt"
    watchdog = Watchdog(timeout_s, stacks, run.ranks.rank)
    with run.record, StopSignal(config.checkpoint.grace_s) as stop, watchdog:
        return _steps(run, stop, watchdog)


def _steps(run: _Run, stop: StopSignal, watchdog: Watchdog) -> Result:
    config, ranks, engine, record, settings = run.config, run.ranks, run.engine, run.record, run.config.train
    warmup_steps = warmup(settings.warmup_steps, settings.warmup_ratio, run.total_steps)
    attention_width = meta.attention_width(run.source.config)
    tokens, loss, perplexity, done = run.tokens_before, None, None, run.steps_before

    for step in range(run.steps_before, run.total_steps):
        record.begin()
        batch = run.batches.step_batch(step, ranks.rank, ranks.world_size)
        summed = torch.zeros((), dtype=torch.float64)
        record.enter("forward")
        for index, micro_batch in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            summed += engine.backward(micro_batch, 1 / max(1, batch.predicted), last).cpu()
        done = step + 1
        own = {"loss": float(summed), "stop": stop.requested, "save": run.saver.report()}
        reports = record.gather(own, batch.own_tokens)
        record.enter("checkpoint")
        loss = _mean_loss(run, [report["loss"] for report in reports], batch.predicted, done)
        stopping = any(report["stop"] for report in reports)
        run.saver.poll([report["save"] for report in reports])
        run.saver.before_update()
        record.enter("optimizer")
        rate = learning_rate(step, run.total_steps, warmup_steps, settings.learning_rate, settings.lr_scheduler_type)
        grad_norm = engine.step(rate, settings.max_grad_norm or None).grad_norm
        if not math.isfinite(grad_norm):
            raise _stopped(run, done, f"the gradient norm is {grad_norm}")
        tokens += batch.tokens
        flops = model_flops(run.built.matmul_parameters, batch.tokens, batch.attention_pairs, attention_width)
        record.end(batch.tokens, flops, run.saver.under_way)
        watchdog.beat()

        if run.ledger.mark("first step", lambda: engine.counters().memory()):
            run.ledger.publish(run.directory.ledger, ranks, run.about)
        if record.due(done):
            metrics = {"loss": loss, "learning_rate": rate, "grad_norm": grad_norm, "tokens": tokens}
            record.log({**metrics, "epoch": batch.epoch, **engine.counters().traffic()})
        if done == run.total_steps or (settings.eval_steps and done % settings.eval_steps == 0):
            found = evaluate(engine, run.data, config.data, run.size, ranks, watchdog.beat)
            perplexity = record.evaluated(*found) if found is not None else None
        due = config.checkpoint.every and done % config.checkpoint.every == 0
        if due or stopping or done == run.total_steps:
            with record.between_steps("checkpoint"):
                run.saver.start(done, _state(run, done, tokens))
        if stopping and done < run.total_steps:
            run.saver.finish()
            raise Terminated(f"stopped by SIGTERM after step {done}, which is saved: start again to continue")

    watchdog.stop()
    run.saver.finish()
    run.ledger.mark(STEADY_PEAK, engine.counters().memory())
    record.finish()
    exported = _export(run) if config.checkpoint.export else None
    said = None
    if (prompt := config.observe.sample_prompt) is not None:
        said = continuation(engine.generate, run.data.load_tokenizer(), prompt, config.observe.sample_tokens)
    rows = run.ledger.publish(run.directory.ledger, ranks, run.about)
    if ranks.rank == 0:
        summary.finish(run.display, run.directory, rows, record.meter.overall(), said, exported, run.ledger.plan)
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
    return DivergedError(f"step {step}: {reason}; {where}. Try a lower train.learning_rate or more warm-up")


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
