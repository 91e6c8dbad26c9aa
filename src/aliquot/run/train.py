"""The main function of a run: join the ranks, prepare (setup.py, starting_point.py), train, export (export_run.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial

from aliquot.checkpoint.directories import complete_directories
from aliquot.config.schema import RunConfig
from aliquot.core.errors import CallbackError
from aliquot.core.on_rank_0 import run_on_rank_0
from aliquot.distributed.config_consistency import check_configs
from aliquot.distributed.launcher import launch_mode
from aliquot.distributed.watchdog import Watchdog
from aliquot.machine.allocator import PeriodicRelease
from aliquot.observe.dashboards import check_installed
from aliquot.observe.events import RunRecord
from aliquot.observe.metrics import Exporter
from aliquot.observe.recorder import RecordedRun, Recorder
from aliquot.observe.run_directory import RunDirectory
from aliquot.planner.compute_ceiling import ceiling
from aliquot.run import setup, starting_point
from aliquot.run.callbacks import Callback, check_callbacks
from aliquot.run.data_sanity import check_first_batch, check_inputs, show_data
from aliquot.run.export_run import finish_run, is_exported
from aliquot.run.reference import with_reference
from aliquot.run.run_checkpoints import RunCheckpoints, start_uploads
from aliquot.run.run_context import (
    Inputs,
    Model,
    Result,
    RunContext,
    Stage,
    Start,
    TrainingContext,
    TrainingProgress,
    join_run,
)
from aliquot.run.shutdown import Shutdown
from aliquot.run.training_loop import TrainingLoop
from aliquot.stores.store import open_store
from aliquot.tensor_io.publish import restore_former


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
    check_callbacks(callbacks)
    exporter = Exporter(config.observe, config.run.name)
    with (
        join_run(config, trains=True, callbacks=callbacks) as run,
        Shutdown(
            config.checkpoint.grace_s,
            speaks=run.ranks.rank == 0,
            describe_loss=partial(_describe_loss, run.directory),
            announce_end=run.heartbeat.announce_end,
            has_mirror=config.checkpoint.mirror is not None,
        ) as shutdown,
    ):
        try:
            with run.directory.locked() if run.ranks.rank == 0 else nullcontext():
                run_on_rank_0(run.ranks, partial(check_installed, config.observe.report_to))
                run_on_rank_0(run.ranks, partial(_check_mirror, config))
                run_on_rank_0(run.ranks, exporter.listen)
                if launch_mode(config.launch, os.environ) == "launcher":
                    run.display.warning(_advise_torchrun(config))
                return _train(run, shutdown, exporter, force)
        finally:
            run.display.finish()
            exporter.close()


def _train(run: RunContext, shutdown: Shutdown, exporter: Exporter, force: bool) -> Result:
    """Prepare the run, then train its remaining steps."""
    run.ledger.mark("process start", {})
    check_configs(run.ranks, run.config)
    run_on_rank_0(run.ranks, lambda: restore_former(run.directory.checkpoints))
    run_on_rank_0(run.ranks, lambda: run.directory.check(run.config))
    setup.check_directory(run)
    run.activity.enter(Stage.READ_DATA)
    run = setup.fetch_model(run)
    inputs = setup.read_inputs(run)
    with closing(inputs.batches):  # data may be tokenised until the end of training
        return _train_on(run, inputs, shutdown, exporter, force)


def _train_on(run: RunContext, inputs: Inputs, shutdown: Shutdown, exporter: Exporter, force: bool) -> Result:
    check_inputs(run, inputs)
    run.activity.enter(Stage.FETCH_CHECKPOINT)
    starting_point.fetch_newest(run)
    run.activity.enter(Stage.PLAN)
    measured = ceiling(run.ranks, run.config.train.precision)
    plan = setup.make_plan(run, inputs, force)
    run, inputs = setup.with_choices_of_plan(run, inputs, plan)
    run.ledger.plan = {} if plan is None else plan.as_record()
    run.activity.enter(Stage.BUILD_MODEL)
    model = setup.build_model(run, inputs, plan)
    run.activity.enter(Stage.LOAD_WEIGHTS)
    begin_model = partial(starting_point.begin_model, run, inputs, model)
    inputs, has_begun = with_reference(run, inputs, model.engine, begin_model)
    start = starting_point.fill_model(run, inputs, model, has_begun)
    inputs = inputs.resumed_at(start, run.config.train)
    setup.wait_for_data(run, inputs, start)
    run_on_rank_0(run.ranks, lambda: run.directory.begin(run.config))
    run_on_rank_0(run.ranks, lambda: run.directory.write_day(inputs.data.day))
    run.activity.enter(Stage.START_ENGINE)
    model.engine.ready()
    run.ledger.mark("optimizer state", model.engine.counters().memory())
    record = setup.introduce(run, inputs, model, start, measured)
    if start.step == 0:
        run_on_rank_0(run.ranks, lambda: show_data(run, inputs))
        if inputs.source.directory is not None:
            check_first_batch(run, inputs, model)

    if advice := starting_point.continuation_advice(run, inputs, start):
        run.display.line(f"this run is complete at step {start.step}: {advice}, or choose another run.name")
        uploader = start_uploads(run, start, run.display.warning)
        run.activity.enter(Stage.COPY_TO_MIRROR)
        uploader.finish()
        is_evaluated = not inputs.held_out or start.evaluations.last_step == start.step
        if is_evaluated and (not run.config.checkpoint.export or is_exported(run, start)):
            return Result(run.directory.path, start.step, None, None, run.directory.export)
        inputs = replace(inputs, total_steps=start.step)  # only the evaluation or the export is left
    return _train_steps(run, record, inputs, model, start, shutdown, exporter)


def _train_steps(
    run: RunContext,
    record: RunRecord,
    inputs: Inputs,
    model: Model,
    start: Start,
    shutdown: Shutdown,
    exporter: Exporter,
) -> Result:
    """Train, save and export, under a watchdog and with a record of every step."""
    ranks, precision = run.ranks, run.config.train.precision
    stack_file = run.directory.logs / f"stacks-rank-{ranks.rank}.txt"
    timeout_s = run.config.launch.step_timeout_s
    with (
        Recorder(
            RecordedRun(run.config, run.directory, ranks, run.display, exporter, record, run.ledger.gpu),
            model.clock, lambda: ceiling(ranks, precision, again=True).flops_per_s,
            steps_before=start.step, total_steps=inputs.total_steps,
        ) as recorder,
        Watchdog(
            timeout_s, stack_file, ranks.rank, ranks.world_size, run.activity.describe, run.heartbeat.explain_hang
        ) as watchdog,
    ):  # fmt: skip
        shutdown.on_request = watchdog.hurry
        progress = TrainingProgress(start.step, inputs.total_steps, start.tokens, start.step, start.evaluations)
        training = TrainingContext(
            run, record, inputs, model, start, setup.files_beside_weights(run, inputs, model), recorder, watchdog,
            shutdown, PeriodicRelease(start.step), progress,
        )  # fmt: skip
        checkpoints = RunCheckpoints(training)
        try:
            TrainingLoop(training, checkpoints).run()
            return finish_run(training, checkpoints)
        except CallbackError:  # the same on all ranks; the weights in the save in progress are good
            checkpoints.finish()
            raise


def _advise_torchrun(config: RunConfig) -> str:
    ranks, nodes = config.launch.ranks, config.launch.nodes
    return (
        f"launch.ranks is {ranks} and launch.nodes is {nodes}, but this process trains as the only rank, because"
        f" aliquot.train starts no other ranks: start the script with `torchrun --nproc-per-node N {sys.argv[0]}`"
    )


def _check_mirror(config: RunConfig) -> None:
    """Raise UserError if a package for the mirror's store is missing; send no request to the store."""
    if config.mirror is not None:
        open_store(config.mirror)


def _describe_loss(directory: RunDirectory) -> str:
    """Return, as text, which steps an immediate end of the run would lose."""
    checkpoints = complete_directories(directory.checkpoints)
    return f"losing the steps after {checkpoints[-1].name}" if checkpoints else "losing all steps"
