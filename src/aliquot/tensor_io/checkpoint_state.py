"""state.json, the file of a checkpoint that holds the training progress and the settings that a resume compares."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from aliquot.core.decode import read_json
from aliquot.tensor_io.manifest import damage_of, read_manifest, verify_file

STATE = "state.json"
DATE_KEY = "data.chat_template_date"  # a determinant of a run whose chat template writes the date


class _Evaluations(BaseModel):
    """Fields of checkpoint/retention.py's EvaluationHistory; `best_loss` is the name of `best_value` in 0.1."""

    model_config = ConfigDict(strict=True, extra="forbid")
    best_step: int | None = None
    best_value: float = 0.0
    best_loss: float = 0.0
    without_improvement: int = 0
    last_step: int | None = None
    metric: str = "loss"


class _Model(BaseModel):
    config: dict[str, Any]
    transformers: str


class _ModelSection(BaseModel):
    path: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]


class _TrainSection(BaseModel):
    precision: str


class _Config(BaseModel):
    model: _ModelSection
    data: dict[str, Any]
    train: _TrainSection
    adapter: dict[str, Any] | None = None


class _Determinants(BaseModel):
    day: Annotated[str, AfterValidator(date.fromisoformat), Field(alias=DATE_KEY)] = ""


class _State(BaseModel):
    model_config = ConfigDict(strict=True)
    step: NonNegativeInt
    tokens: NonNegativeInt
    position: Annotated[dict[Literal["epoch", "index"], NonNegativeInt], Field(min_length=2)]
    determinants: _Determinants
    config: _Config
    ends: list[int]
    evaluations: _Evaluations
    model: _Model
    # aliquot 0.1.0 does not record these.
    sizes: dict[str, Annotated[list[int], Field(min_length=2, max_length=2)]] = {}
    hub_ids: list[str] = []


def read_state(directory: Path) -> dict[str, Any]:
    """Verify and return the state of a checkpoint, with at least those fields that have no default in `_State`.

    Raises DamagedCheckpoint, also if a field is missing or has a wrong type.
    """
    verify_file(directory, read_manifest(directory), STATE)
    state = read_json(directory / STATE)
    try:
        _State.model_validate(state)
    except ValidationError as error:
        raise damage_of(error, directory / STATE) from error
    return state
