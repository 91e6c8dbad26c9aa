"""The current activity of a rank, as errors and watchdogs name it: `... while planning`."""

from __future__ import annotations

from enum import Enum


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
