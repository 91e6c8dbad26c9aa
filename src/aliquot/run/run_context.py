"""What a run has at each stage: who takes part, what is trained on, the model, and where training begins."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from aliquot.checkpoint.evaluation_history import EvaluationHistory
from aliquot.config.schema import RunConfig, TrainSection
from aliquot.data.batch_size import BatchSize
from aliquot.data.batches import Batches, Position
from aliquot.data.eval_batches import EvalBatches
from aliquot.data.prepare import Prepared
from aliquot.distributed.ranks import Ranks
from aliquot.engines.base import Engine
from aliquot.models import meta
from aliquot.models.adapter import BASE
from aliquot.models.published import Published
from aliquot.models.source import ModelSource
from aliquot.models.stored_weights import StoredNames
from aliquot.models.traits import Traits
from aliquot.observe.console import Display
from aliquot.observe.ledger import Ledger
from aliquot.observe.prometheus import Exporter
from aliquot.observe.run_directory import RunDirectory
from aliquot.observe.step_clock import StepClock
from aliquot.optim.schedule import Schedule
from aliquot.planner.plan import Plan
from aliquot.tensor_io.parts import PartStore, SelectedParts


class Stage(Enum):
    """What a rank does, in the words of an error line: `... while planning`."""

    START = "beginning"
    READ_DATA = "reading and tokenising the data"
    PLAN = "planning"
    BUILD_MODEL = "building the model"
    LOAD_WEIGHTS = "loading weights"
    START_ENGINE = "making the engine ready"
    STEP = "in step {step}"
    COMPILE_EVALUATION = "compiling what evaluates"
    EVALUATE = "evaluating"
    SAVE = "saving step {step}"
    FINISH_SAVE = "finishing a checkpoint"
    COPY_TO_MIRROR = "copying checkpoints to the mirror"
    EXPORT = "exporting the model"
    SAMPLE = "generating the sample"
    EVALUATE_MODEL = "evaluating a model"


class Activity:
    """The stage in which this rank is. Heartbeat and watchdogs name it when a node is lost or the run hangs."""

    def __init__(self) -> None:
        self._words = Stage.START.value

    def enter(self, stage: Stage, step: int = 0, saving: int | None = None) -> None:
        """`step`: the step of a stage that has one; `saving`: the step whose checkpoint is written meanwhile."""
        self._words = stage.value.format(step=step) + ("" if saving is None else f", and saving step {saving}")

    def describe(self) -> str:
        return self._words


@dataclass(frozen=True)
class Attempt:
    """What an attempt at a run has before there is anything to train: who takes part, and where everything is told."""

    config: RunConfig
    ranks: Ranks
    directory: RunDirectory
    display: Display
    exporter: Exporter
    ledger: Ledger
    activity: Activity
    about: dict[str, Any]  # placement, machine, model, engine: what it is made of, as JSON


@dataclass(frozen=True)
class Inputs:
    """What is trained on what: a model's description, and the batches of every step."""

    source: ModelSource
    traits: Traits
    data: Prepared
    tokenizer: Any  # of transformers
    size: BatchSize
    batches: Batches
    held_out: dict[str, EvalBatches]  # by name; one that has none is called ""
    total_steps: int
    schedule: Schedule  # of the learning rate

    def behind(self, start: Start, train: TrainSection) -> Inputs:
        """The batches that follow on those of the earlier stages of a run."""
        batches = self.batches.going_on(start.step, start.position, start.ends)
        total_steps = batches.total_steps(train.max_steps)
        return replace(self, batches=batches, total_steps=total_steps, schedule=Schedule.of(train, total_steps))

    @property
    def evaluated(self) -> str | None:
        """Which evaluation set decides what is best: the hash of its tokens."""
        return next((Path(store).name for store in self.data.eval.values()), None)

    def determinants(self, config: RunConfig) -> dict[str, str | int | float | None]:
        """What a checkpoint goes on with: the order of the data, and the model beside which an adapter is learned."""
        fixed = self.batches.determinants()
        if self.data.day is not None:
            fixed["data.chat_template_date"] = self.data.day
        if config.adapter is None:
            return fixed
        scaling = {f"adapter.{key}": getattr(config.adapter, key) for key in ("r", "alpha", "use_rslora")}
        return fixed | scaling | {BASE: str(self.source.fingerprint)}


@dataclass(frozen=True)
class Model:
    """A model in the hands of its engine."""

    built: meta.MetaModel
    published: tuple[Published, ...] | None  # how its weights are stored, where that is not as it holds them
    names: StoredNames
    engine: Engine
    engine_name: str
    clock: StepClock
    notes: tuple[str, ...]  # for the person, of the engine
    plan: Plan | None  # that the engine was built by

    @property
    def saved(self) -> PartStore:
        """What of it a checkpoint holds."""
        whole = self.built.adapter is None
        return self.engine if whole else SelectedParts(self.engine, {name for name, _ in self.built.saved})


@dataclass(frozen=True)
class Start:
    """Where training begins: behind the steps and real tokens of the runs that this one continues."""

    step: int = 0
    tokens: int = 0
    resumed_from: Path | None = None
    position: Position = field(default_factory=lambda: Position(0, 0))  # in the data
    ends: tuple[int, ...] = ()  # where they ended within a batch: data/data_order.py
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
