"""A rank of a run that has joined the others, resolved the run, and built and filled its model."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Self

from aliquot.checkpoint.directories import complete_directories
from aliquot.checkpoint.mirror import fetch_newer
from aliquot.config.schema import RunConfig
from aliquot.core.on_rank_0 import gather_results, run_on_all_ranks, run_on_rank_0
from aliquot.distributed.config_consistency import check_configs
from aliquot.distributed.flight_recorder import record_collectives
from aliquot.distributed.launcher import launch_mode
from aliquot.distributed.liveness.liveness import Liveness
from aliquot.distributed.liveness.watchdog import Activity, PhaseNotice
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.rendezvous import infer_local_ranks
from aliquot.distributed.topology import choose_device, place_rank
from aliquot.machine.cpu import read_cpu
from aliquot.machine.facts import machine_facts
from aliquot.machine.memory import current_gpu
from aliquot.observe.console import Display
from aliquot.observe.dashboards import check_installed
from aliquot.observe.ledger import Ledger
from aliquot.observe.metrics import Exporter
from aliquot.observe.run_directory import RunDirectory
from aliquot.optim.schedule import Schedule
from aliquot.run.built_model import build_model
from aliquot.run.callbacks import Callback, check_callbacks
from aliquot.run.data_sanity import check_first_batch, introduce, show_data
from aliquot.run.reference import compare_with_reference, with_reference
from aliquot.run.resolved_run import read_inputs, resolve_run
from aliquot.run.shutdown import Shutdown
from aliquot.run.starting_point import check_newest, fill_model
from aliquot.run.training_progress import TrainingProgress
from aliquot.stores.store import open_store
from aliquot.tensor_io.publish import restore_former

# gloo's collectives may wait this long, because reading a terabyte of text takes more than a day. The exit of a
# rank ends all ranks, and the watchdogs of distributed/liveness end a run that hangs.
_COLLECTIVE_TIMEOUT_S = 30 * 24 * 3600.0


class PreparedRun:
    """One rank of a run: entering the context prepares it. Every rank enters the context."""

    has_own_loop = False  # whether the caller decides how many micro-batches an optimizer step has

    def __init__(
        self, config: RunConfig, force: bool = False, callbacks: Sequence[Callback] = (), trains: bool = True
    ) -> None:
        """Prepare to enter the context.

        Args:
            config: the run configuration, whose settings may be `auto`.
            force: start even if the plan says that the run does not fit into memory.
            callbacks: see `train`.
            trains: False for a stand-alone evaluation, which writes no files.
        """
        check_callbacks(callbacks)
        self.requested, self.force = config, force
        self.activity = Activity()
        self._user_callbacks, self._trains = callbacks, trains

    def __enter__(self) -> Self:
        """Join the other ranks, plan, build the model, and load the weights with which training begins. Collective."""
        with ExitStack() as stack:
            self._join(stack)
            if self._trains:
                self._open(stack)
            self._resolve(stack)
            self.activity.enter("building the model")
            self.model = build_model(self)
            self._fill()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:  # after an error, other ranks may not close their engines
            self.model.engine.close()
        self._stack.__exit__(*error)

    @property
    def config(self) -> RunConfig:
        """The configuration with a value for each setting that may be `auto`."""
        return self.resolved.config

    def _join(self, stack: ExitStack) -> None:
        """Join the ranks of this run; run the heartbeat and the watchdogs until the context ends."""
        launch = self.requested.launch
        with infer_local_ranks(os.environ, launch.join_timeout_s) as bound:
            topology, self.placement = place_rank(launch, os.environ, read_cpu(), choose_device(launch.device), bound)
            # Facts of the machine must be read before `join` pins this process to its cores.
            machine = machine_facts() if self._trains and topology.is_first else None
            self.directory, timeout_s = RunDirectory(self.requested.run.directory), launch.step_timeout_s
            logs = self.directory.logs if self._trains else None
            if topology.device == "cuda":
                record_collectives(logs)
            self.ranks = Ranks.join(topology, _COLLECTIVE_TIMEOUT_S, launch.join_timeout_s, timeout_s)
        stack.enter_context(self.ranks.closing())
        liveness = Liveness(topology, self.ranks.store, timeout_s, lambda: self.activity.stage, logs)
        self.liveness = stack.enter_context(liveness)
        gpu = current_gpu(topology.device) if self._trains else None
        self.machine = self.ranks.broadcast(machine) or {}
        self.display = Display(self.requested.observe.console, enabled=topology.is_first)
        if topology.is_first:
            stack.enter_context(PhaseNotice(self.activity, self.display.line))
        self.ledger = Ledger(topology.rank, gpu, offloads=self.requested.shard.offload == "cpu")
        stack.callback(self.display.finish)
        check_configs(self.ranks, self.requested)

    def _open(self, stack: ExitStack) -> None:
        """Lock the run directory and check it, handle signals, and open what receives metrics."""
        config, ranks = self.requested, self.ranks
        self.exporter = Exporter(config.observe, config.run.name)
        self.shutdown = stack.enter_context(
            Shutdown(
                config.checkpoint.grace_s,
                speaks=ranks.rank == 0,
                describe_loss=partial(_describe_loss, self.directory),
                announce_end=self.liveness.heartbeat.announce_end,
                has_mirror=config.checkpoint.mirror is not None,
                notify=self.display.notify,
                restore_terminal=self.display.finish,
            )
        )
        stack.callback(self.exporter.close)
        if ranks.rank == 0:
            stack.enter_context(self.directory.lock.hold())
        run_on_rank_0(ranks, partial(check_installed, config.observe.report_to))
        run_on_rank_0(ranks, partial(_check_mirror, config))
        run_on_rank_0(ranks, self.exporter.listen)
        if launch_mode(config.launch, os.environ) == "launcher":
            self.display.warning(
                f"launch.ranks is {config.launch.ranks} and launch.nodes is {config.launch.nodes}, but this process"
                " trains as the only rank, because aliquot.train starts no other ranks: start the script with"
                f" `torchrun --nproc-per-node N {sys.argv[0]}`"
            )
        self.ledger.mark("process start", {})
        run_on_rank_0(ranks, lambda: restore_former(self.directory.checkpoints))
        run_on_rank_0(ranks, lambda: self.directory.check(config))
        if ranks.world_size > 1:
            _check_is_shared(self.directory, ranks)

    def _resolve(self, stack: ExitStack) -> None:
        """Read the inputs and choose each setting that is `auto`."""
        if not self._trains:
            self.activity.enter("evaluating a model")
            self.resolved = compare_with_reference(self, read_inputs(self, trains=False))
            return
        self.activity.enter("fetching a checkpoint")
        # Before the inputs are read, because settings that are `auto` depend on the checkpoint.
        config, root = self.requested, self.directory.checkpoints
        fetch_newer(config.checkpoint, config.mirror, root, self.ranks, self.display.warning)
        self.activity.enter("reading and tokenising the data")
        inputs = read_inputs(self)
        stack.enter_context(closing(inputs.batches))  # data may be tokenised until the end of training
        self.resolved = inputs
        run_on_rank_0(self.ranks, lambda: check_newest(self))  # before the plan, and before the model is built
        self.activity.enter("planning")
        self.resolved = resolve_run(self, inputs)
        self.ledger.plan = {} if self.resolved.plan is None else self.resolved.plan.as_record()

    def _fill(self) -> None:
        """Load the weights with which the run begins or resumes, and lay out the steps that are left."""
        if not self._trains:
            self.start = fill_model(self)
            self.model.engine.ready()
            return
        config, engine = self.config, self.model.engine
        self.activity.enter("loading weights")
        batches, self.held_out, has_begun = with_reference(self)
        self.start = fill_model(self, has_begun)
        self.state = dict(self.start.state)
        self.train_batches = batches.continued_at(self.start.step, self.start.position, self.start.ends)
        self.total_steps = self.train_batches.total_steps(config.train.max_steps)
        self.progress = TrainingProgress(
            self.start.step, self.total_steps, self.start.tokens, self.start.step, self.start.evaluations
        )
        self.schedule = Schedule.of(config.train, self.total_steps)
        self._wait_for_data()
        run_on_rank_0(self.ranks, lambda: self.directory.begin(config))
        run_on_rank_0(self.ranks, lambda: self.directory.write_day(self.resolved.data.day))
        self.activity.enter("preparing the engine")
        engine.ready()
        self.ledger.mark("optimizer state", engine.counters().memory())
        self.record = introduce(self)
        if self.start.step == 0:
            run_on_rank_0(self.ranks, lambda: show_data(self))
            if self.resolved.source.directory is not None:
                check_first_batch(self)

    def _wait_for_data(self) -> None:
        """Return when the data of the next step are tokenised: a new node begins to tokenise a stream anew."""
        step, streams = min(self.start.step + 1, self.total_steps), self.resolved.data.streams
        if streams:
            self.activity.enter("reading and tokenising the data")
            is_maker = any(stream.maker is not None for stream in streams.values())
            run_on_all_ranks(self.ranks, lambda: self.train_batches.wait_for(step) if is_maker else None)


def _check_is_shared(directory: RunDirectory, ranks: Ranks) -> None:
    """Check that all ranks see the same run directory. Collective. Raises NodesDifferError on every rank.

    Even containers on one host may have different file systems.
    """
    name = run_on_rank_0(ranks, directory.create_marker)
    try:
        gather_results(ranks, lambda: directory.find_marker(name) if ranks.rank > 0 else None)
    finally:
        if ranks.rank == 0:
            directory.remove_marker(name)


def _check_mirror(config: RunConfig) -> None:
    """Raise UserError if a package for the mirror's store is missing; send no request to the store."""
    if config.mirror is not None:
        open_store(config.mirror)


def _describe_loss(directory: RunDirectory) -> str:
    """Return, as text, which steps an immediate end of the run would lose."""
    checkpoints = complete_directories(directory.checkpoints)
    return f"losing the steps after {checkpoints[-1].name}" if checkpoints else "losing all steps"
