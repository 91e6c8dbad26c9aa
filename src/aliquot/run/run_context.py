"""The state of a run: its ranks and services, its inputs, its model, the point where training begins, its progress."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aliquot.checkpoint.directories import directory_of
from aliquot.checkpoint.retention import EvaluationHistory
from aliquot.config.schema import RunConfig, TrainSection
from aliquot.data.batches import Batches, Position
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import Prepared
from aliquot.data.workload import BatchSize
from aliquot.distributed.flight_recorder import CollectiveWatchdog, record_collectives
from aliquot.distributed.heartbeat import SILENT_S, Heartbeat
from aliquot.distributed.idle_watchdog import IdleWatchdog
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.rendezvous import infer_local_ranks
from aliquot.distributed.topology import choose_device, place_rank
from aliquot.distributed.watchdog import Watchdog
from aliquot.engines.base import Engine
from aliquot.machine.allocator import PeriodicRelease
from aliquot.machine.cpu import read_cpu
from aliquot.machine.facts import machine_facts
from aliquot.machine.memory import current_gpu
from aliquot.models import meta
from aliquot.models.adapter import BASE
from aliquot.models.source import ModelSource
from aliquot.models.stored_weights import Published, StoredNames
from aliquot.models.traits import Traits
from aliquot.observe.console import Display
from aliquot.observe.events import RunRecord
from aliquot.observe.ledger import Ledger
from aliquot.observe.recorder import Recorder
from aliquot.observe.run_directory import RunDirectory
from aliquot.observe.step_clock import StepClock
from aliquot.optim.schedule import Schedule
from aliquot.planner.plan import Plan
from aliquot.run.callbacks import Callback, Callbacks, Event
from aliquot.run.shutdown import Shutdown
from aliquot.tensor_io.parts import PartStore, SelectedParts

# gloo's collectives may wait this long, because reading a terabyte of text takes more than a day. Other mechanisms end
# a failed run earlier. The exit of a rank ends all ranks. The heartbeat ends a run with a lost node. The idle watchdog
# ends a run that does nothing, and the watchdog ends a run whose training step takes too long. NCCL's collectives have
# a watchdog and a timeout of their own, because a rank that waits for NCCL looks busy.
_COLLECTIVE_TIMEOUT_S = 30 * 24 * 3600.0


class Stage(Enum):
    """The activity of a rank, as error lines name it: `... while planning`."""

    START = "beginning"
    READ_DATA = "reading and tokenising the data"
    FETCH_CHECKPOINT = "fetching a checkpoint"
    PLAN = "planning"
    BUILD_MODEL = "building the model"
    LOAD_WEIGHTS = "loading weights"
    REFERENCE = "computing reference log-probabilities"
    START_ENGINE = "preparing the engine"
    STEP = "in step {step}"
    COMPILE_EVALUATION = "compiling the evaluation"
    EVALUATE = "evaluating"
    SAVE = "saving step {step}"
    FINISH_SAVE = "finishing a checkpoint"
    COPY_TO_MIRROR = "copying checkpoints to the mirror"
    EXPORT = "exporting the model"
    SAMPLE = "generating the sample"
    EVALUATE_MODEL = "evaluating a model"


class Activity:
    """The current stage of this rank, which heartbeat and watchdogs report when a node is lost or the run hangs."""

    def __init__(self) -> None:
        self._words = Stage.START.value

    def enter(self, stage: Stage, step: int = 0, saving: int | None = None) -> None:
        """Enter a stage. `step`: its optimizer step, if any; `saving`: the step whose checkpoint is being written."""
        self._words = stage.value.format(step=step) + ("" if saving is None else f", and saving step {saving}")

    def describe(self) -> str:
        return self._words


@dataclass(frozen=True)
class RunContext:
    """The ranks of a run, its directory, and the services that every stage uses."""

    config: RunConfig
    ranks: Ranks
    placement: str  # the placement of ranks on cores, for the console
    machine: Mapping[str, Any]  # facts of rank 0's machine; empty if nothing is trained
    directory: RunDirectory
    display: Display
    ledger: Ledger
    activity: Activity
    heartbeat: Heartbeat
    callbacks: Callbacks


@contextmanager
def join_run(config: RunConfig, trains: bool, callbacks: Sequence[Callback] = ()) -> Iterator[RunContext]:
    """Join the ranks of this run; run the heartbeat and the idle watchdog until the block ends.

    `trains` is False for a stand-alone evaluation, which writes no files.
    """
    with infer_local_ranks(os.environ, config.launch.join_timeout_s) as bound:
        topology, placement = place_rank(
            config.launch, os.environ, read_cpu(), choose_device(config.launch.device), bound
        )
        # Facts of the machine must be read before `join` pins this process to its cores.
        machine = machine_facts() if trains and topology.is_first else None
        directory, timeout_s = RunDirectory(config.run.directory), config.launch.step_timeout_s
        if topology.device == "cuda":
            record_collectives(directory.logs if trains else None)
        ranks = Ranks.join(topology, _COLLECTIVE_TIMEOUT_S, config.launch.join_timeout_s, timeout_s)
    activity = Activity()
    stack_file = directory.logs / f"still-rank-{topology.rank}.txt" if trains else None
    gpu = current_gpu(topology.device) if trains else None
    with (
        ranks.closing(),
        Heartbeat(topology, ranks.store, min(SILENT_S, timeout_s), activity.describe) as heartbeat,
        CollectiveWatchdog(topology, timeout_s, directory.logs if trains else None, activity.describe),
        IdleWatchdog(topology, ranks.store, timeout_s, stack_file, activity.describe, heartbeat.explain_hang),
    ):
        yield RunContext(
            config, ranks, placement, ranks.broadcast(machine) or {}, directory,
            Display(config.observe.console, enabled=topology.is_first),
            Ledger(ranks.rank, gpu, offloads=config.shard.offload == "cpu"), activity, heartbeat,
            Callbacks(callbacks, ranks),
        )  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run: the description of the model, the data, and the batches of every step."""

    source: ModelSource
    traits: Traits
    data: Prepared
    tokenizer: Any  # a tokenizer of transformers
    size: BatchSize
    batches: Batches
    held_out: dict[str, EvalBatches]  # evaluation sets by name; a single set may have the name ""
    total_steps: int
    schedule: Schedule  # of the learning rate

    def with_micro_batches(self, sequences: int) -> Inputs:
        """Return the inputs with `sequences` in a micro-batch, for the same global batches."""
        held_out = {name: batches.with_micro_batches(sequences) for name, batches in self.held_out.items()}
        batches = self.batches.with_micro_batches(sequences)
        return replace(self, size=replace(self.size, micro=sequences), batches=batches, held_out=held_out)

    def resumed_at(self, start: Start, train: TrainSection) -> Inputs:
        """Return the inputs whose first batch follows the last batch before `start`."""
        batches = self.batches.continued_at(start.step, start.position, start.ends)
        total_steps = batches.total_steps(train.max_steps)
        return replace(self, batches=batches, total_steps=total_steps, schedule=Schedule.of(train, total_steps))

    @property
    def evaluated(self) -> str | None:
        """The hash of the tokens of the evaluation set that decides which checkpoint is best."""
        return next((Path(store).name for store in self.data.eval.values()), None)

    def determinants(self, config: RunConfig) -> dict[str, str | int | float | None]:
        """Return the values that must not change when a run resumes, by key.

        They determine the order of the data, the reference of a preference loss, and the base model and the scaling of
        an adapter.
        """
        fixed = self.batches.determinants()
        if self.data.day is not None:
            fixed["data.chat_template_date"] = self.data.day
        if (objective := self.batches.format.objective) is not None and objective.needs_reference:
            fixed[BASE] = str(self.source.fingerprint)
        if config.adapter is None:
            return fixed
        scaling = {f"adapter.{key}": getattr(config.adapter, key) for key in ("r", "alpha", "use_rslora")}
        return fixed | scaling | {BASE: str(self.source.fingerprint)}


@dataclass(frozen=True)
class Model:
    """A model and the engine that holds it."""

    built: meta.MetaModel
    published: tuple[Published, ...] | None  # the stored form of the weights, if it differs from the form in the model
    names: StoredNames
    engine: Engine
    engine_name: str
    clock: StepClock
    notes: tuple[str, ...]  # of the engine, for the console
    plan: Plan | None  # the plan by which the engine was built

    @property
    def saved(self) -> PartStore:
        """The parts that a checkpoint holds: all parts of a model, or only the parts of an adapter."""
        if self.built.adapter is None:
            return self.engine
        return SelectedParts(self.engine, {name for name, _ in self.built.saved})


@dataclass(frozen=True)
class Start:
    """The point where training begins: after the steps and tokens (without padding) of earlier runs, if it resumes."""

    step: int = 0
    tokens: int = 0
    resumed_from: Path | None = None
    position: Position = field(default_factory=lambda: Position(0, 0))  # in the data
    ends: tuple[int, ...] = ()  # where earlier runs ended within a batch (data/data_order.py)
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)


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


@dataclass(frozen=True)
class TrainingContext:
    """The objects that the steps, evaluations, saves and the export of a run share."""

    run: RunContext
    record: RunRecord
    inputs: Inputs
    model: Model
    start: Start
    files: Mapping[str, bytes]  # files beside the weights in checkpoints and exports, by name
    recorder: Recorder
    watchdog: Watchdog
    shutdown: Shutdown
    memory_release: PeriodicRelease
    progress: TrainingProgress

    def requested_signal(self) -> int:
        """Return the stop signal that any rank has received, or 0. Collective."""
        return self.agreed_signal(self.run.ranks.gather(self.shutdown.requested))

    def agreed_signal(self, signals: Iterable[int]) -> int:
        """Return the stop signal among the signals of all ranks, or 0."""
        agreed = max(signals)
        if agreed:
            self.watchdog.relax()
        return agreed

    def call_back(self, event: Event, metrics: Mapping[str, Any]) -> None:
        """Call the user's callbacks, and end the run early if one asks to stop. Collective. Raises CallbackError."""
        run, start, progress, batches = self.run, self.start, self.progress, self.inputs.batches
        if run.callbacks.is_empty:
            return
        saved = directory_of(run.directory.checkpoints, progress.saved_step)
        run.callbacks.call(
            event, directory=run.directory.path, step=progress.step, last_step=progress.last_step,
            epoch=batches.sequences_until(progress.step) / batches.epoch_sequences, tokens=progress.tokens,
            metrics=MappingProxyType(dict(metrics)),
            checkpoint=saved if progress.saved_step > start.step else start.resumed_from,
        )  # fmt: skip
        self.watchdog.beat()
        # A save may complete in the middle of a step, which must end first. Without any step, there is nothing to save.
        if run.callbacks.stopped_by is not None and event != "on_save" and progress.step > start.step:
            self.end_early(f"callback {run.callbacks.stopped_by} called stop()")

    def end_early(self, reason: str) -> None:
        """Make the last finished step the last step of the run."""
        if self.progress.step < self.progress.last_step:
            self.progress.last_step = self.progress.step
            self.recorder.stopped_early(reason)


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        directory: The run directory.
        steps: The number of finished optimizer steps, including the steps of earlier starts of this run.
        loss: The training loss of the last step, in nats per token. None if this process has trained no step.
        perplexity: The perplexity of the last evaluation. None without an evaluation.
        export: The directory of the exported model. None if `checkpoint.export` is false.
    """

    directory: Path
    steps: int
    loss: float | None
    perplexity: float | None
    export: Path | None
