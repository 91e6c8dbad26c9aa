"""The current activity of a rank, as errors and watchdogs name it: `... while planning`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from aliquot.distributed.liveness.watchdog import Watchdog

_REST_S = 30.0


class Stage(Enum):
    """A part of a run."""

    START = "beginning"
    FETCH_CHECKPOINT = "fetching a checkpoint"
    READ_DATA = "reading and tokenising the data"
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


class PhaseNotice(Watchdog):
    """A context manager that shows a stage that has lasted for 30 seconds, once: silence would look like a hang."""

    def __init__(self, activity: Activity, show: Callable[[str], None]) -> None:
        super().__init__(_REST_S)
        self._activity, self._show = activity, show
        self._before = self._shown = ""

    def check(self) -> None:
        stage = self._activity.describe()
        if stage == self._before != self._shown:
            self._show(f"still {stage}")
            self._shown = stage
        self._before = stage
