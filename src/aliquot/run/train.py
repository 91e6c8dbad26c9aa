"""The story of a run, top to bottom: join the ranks, prepare (run/setup.py), train (run/training_loop.py), end."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from aliquot.checkpoint.background_task import SaveEvents
from aliquot.checkpoint.directories import complete_directories
from aliquot.checkpoint.remote_upload import Uploader
from aliquot.config.schema import RunConfig
from aliquot.core.on_rank_0 import run_on_rank_0
from aliquot.distributed.config_consistency import check_configs
from aliquot.distributed.heartbeat import Heartbeat
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.rendezvous import infer_local_ranks
from aliquot.distributed.topology import choose_device, place
from aliquot.distributed.watchdog import IdleWatchdog, Watchdog
from aliquot.machine.cpu import read_cpu
from aliquot.machine.facts import machine_facts
from aliquot.machine.gpu_memory import current_gpu
from aliquot.observe.console import Display
from aliquot.observe.dashboards import check_installed
from aliquot.observe.ledger import Ledger
from aliquot.observe.prometheus import Exporter
from aliquot.observe.recorder import Recorder
from aliquot.observe.run_directory import RunDirectory
from aliquot.planner.compute_ceiling import ceiling
from aliquot.run import export_run, setup
from aliquot.run.run_context import Activity, Attempt, Stage, Start
from aliquot.run.shutdown import Shutdown
from aliquot.run.training_loop import Result, Training
from aliquot.stores.open_store import open_store
from aliquot.tensor_io.publish import restore_former

# Only training steps are on the watchdog's clock: reading data and weights may take long. A rank that dies ends the
# run at once anyway, a node that is lost soon (heartbeat.py), and a run in which nobody does anything (IdleWatchdog).
_PREPARATION_TIMEOUT_S = 30 * 24 * 3600.0  # a terabyte of text takes more than a day


def train(config: RunConfig, force: bool = False) -> Result:
    """Train as this process's rank: alone, or one of many where torchrun's variables are set.

    Every rank calls it with the same config. `force`: even if the plan says that it does not fit. Raises UserError for
    bad input, TrainingError for a run that must stop.
    """
    with infer_local_ranks(os.environ, config.launch.join_timeout_s) as bound:
        topology, placement = place(config.launch, os.environ, read_cpu(), choose_device(config.launch.device), bound)
        machine = machine_facts() if topology.is_first else None
        ranks = Ranks.join(topology, _PREPARATION_TIMEOUT_S, config.launch.join_timeout_s)
    display = Display(config.observe.console, enabled=topology.is_first)
    exporter = Exporter(config.observe, config.run.name)
    directory, activity = RunDirectory(config.run.directory), Activity()
    stacks, timeout_s = directory.logs / f"still-rank-{topology.rank}.txt", config.launch.step_timeout_s
    with (
        ranks.closing(),
        Heartbeat(topology, ranks.store, timeout_s, activity.describe) as heartbeat,
        IdleWatchdog(topology, ranks.store, timeout_s, stacks, activity.describe),
        Shutdown(
            config.checkpoint.grace_s,
            topology.is_first,
            partial(_describe_loss, directory),
            heartbeat.announce_end,
            has_mirror=config.checkpoint.mirror is not None,
        ) as shutdown,
    ):
        try:
            with directory.locked() if topology.is_first else nullcontext():
                run_on_rank_0(ranks, partial(check_installed, config.observe.report_to))
                run_on_rank_0(ranks, partial(_check_mirror, config))
                run_on_rank_0(ranks, exporter.listen)
                about = {"placement": placement, "machine": ranks.broadcast(machine)}
                ledger = Ledger(ranks.rank, current_gpu(topology.device), offloads=config.shard.offload == "cpu")
                run = Attempt(config, ranks, directory, display, exporter, ledger, activity, about)
                return _train(run, heartbeat, shutdown, force)
        finally:
            display.finish()
            exporter.close()


def _train(run: Attempt, heartbeat: Heartbeat, shutdown: Shutdown, force: bool) -> Result:
    run.ledger.mark("process start", {})
    check_configs(run.ranks, run.config)
    run_on_rank_0(run.ranks, lambda: restore_former(run.directory.checkpoints))
    run_on_rank_0(run.ranks, lambda: run.directory.check(run.config))
    setup.check_directory(run)
    run.activity.enter(Stage.READ_DATA)
    inputs = setup.read_inputs(run)
    setup.check_inputs(run, inputs)
    run.activity.enter(Stage.PLAN)
    plan = setup.foresee(run, inputs, force)
    run.ledger.plan = {} if plan is None else plan.as_record()
    run.activity.enter(Stage.BUILD_MODEL)
    model = setup.build_model(run, inputs, plan)
    run.activity.enter(Stage.LOAD_WEIGHTS)
    start = setup.fill_model(run, inputs, model)
    inputs = inputs.behind(start, run.config.train)
    run_on_rank_0(run.ranks, lambda: run.directory.begin(run.config))
    run_on_rank_0(run.ranks, lambda: run.directory.keep_day(inputs.data.day))
    run.activity.enter(Stage.START_ENGINE)
    model.engine.ready()
    run.ledger.mark("optimizer state", model.engine.counters().memory())
    setup.introduce(run, inputs, model, start)
    if start.step == 0 and inputs.source.directory is not None:
        setup.check_beginning(run, inputs, model)

    if why := setup.complete(run, inputs, start):
        run.display.line(f"this run is complete at step {start.step}: {why}, or choose another run.name")
        mirror = _mirror(run, start, run.display.warning)
        run.activity.enter(Stage.COPY_TO_MIRROR)
        mirror.finish()
        evaluated = not inputs.held_out or start.evaluations.last_step == start.step
        if evaluated and (not run.config.checkpoint.export or export_run.is_exported(run, start)):
            return Result(run.directory.path, start.step, None, None, run.directory.export)
        inputs = replace(inputs, total_steps=start.step)  # what is left to do is the export
    stacks = run.directory.logs / f"stacks-rank-{run.ranks.rank}.txt"
    with (
        Recorder(
            run.config, run.directory, run.ranks, run.display, model.clock, run.exporter, run.about,
            lambda: ceiling(run.ranks, run.config.train.precision, again=True).flops_per_s, run.ledger.gpu,
            steps_before=start.step, total_steps=inputs.total_steps,
        ) as record,
        Watchdog(
            run.config.launch.step_timeout_s, stacks, run.ranks.rank, run.ranks.world_size, run.activity.describe
        ) as watchdog,
    ):  # fmt: skip
        mirror = _mirror(run, start, record.warn, watchdog.beat)
        training = Training(run, inputs, model, start, record, shutdown, watchdog, mirror, heartbeat)
        training.all_steps()
        return training.finish()


def _check_mirror(config: RunConfig) -> None:
    """Raises UserError where a package is missing. Whether the store answers is seen when it is looked into."""
    if config.mirror is not None:
        open_store(config.mirror)


def _mirror(
    run: Attempt, start: Start, warn: Callable[[str], None], beat: Callable[[], None] = lambda: None
) -> Uploader:
    """Re-queue uploads that a killed attempt left unfinished."""
    config, root = run.config, run.directory.checkpoints
    events = SaveEvents(warn, run.display.line, heartbeat=beat, check_directory=run.directory.check_publish)
    mirror = Uploader(config.mirror, root, run.ranks, config.checkpoint, events)
    if start.resumed_from is not None and start.resumed_from.parent.resolve() == root.resolve():
        best = start.evaluations.retained_step(config.checkpoint)
        for step in sorted({start.step, *([] if best is None else [best])}):
            mirror.start(step, best)
    return mirror


def _describe_loss(directory: RunDirectory) -> str:
    kept = complete_directories(directory.checkpoints)
    return f"losing what came after {kept[-1].name}" if kept else "losing all that it has trained"
