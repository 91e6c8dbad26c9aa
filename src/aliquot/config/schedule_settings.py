"""The settings in `train.lr_scheduler_kwargs` for each `train.lr_scheduler_type`, named as transformers names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

Kind = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
Shape = Literal["linear", "cosine", "1-sqrt"]


class Constant(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    def check(self, peak: float) -> None:
        """Raise ValueError for a setting that contradicts `peak`, the highest learning rate."""


class Linear(Constant):
    pass


class Cosine(Constant):
    num_cycles: PositiveFloat = 0.5


class CosineWithRestarts(Constant):
    num_cycles: PositiveInt = 1


class CosineWithMinLr(Cosine):
    min_lr: NonNegativeFloat | None = None
    min_lr_rate: float | None = Field(None, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def one_minimum(self) -> Self:
        if (self.min_lr is None) == (self.min_lr_rate is None):
            raise ValueError("give exactly one of min_lr (a rate) and min_lr_rate (a part of train.learning_rate)")
        return self

    def check(self, peak: float) -> None:
        if self.min_lr is not None and self.min_lr > peak:
            raise ValueError(f"min_lr {self.min_lr:g} is above train.learning_rate {peak:g}")

    def lowest(self, peak: float) -> float:
        """Return the lowest learning rate as a fraction of `peak`."""
        return self.min_lr / peak if self.min_lr is not None else self.min_lr_rate or 0.0


class CosineWarmupWithMinLr(CosineWithMinLr):
    warmup_lr_rate: float | None = Field(None, ge=0.0, le=1.0)


class Polynomial(Constant):
    lr_end: NonNegativeFloat = 1e-7
    power: PositiveFloat = 1.0

    def check(self, peak: float) -> None:
        if self.lr_end >= peak:
            raise ValueError(f"lr_end {self.lr_end:g} is not below train.learning_rate {peak:g}")


class InverseSqrt(Constant):
    timescale: PositiveInt | None = None


class WarmupStableDecay(Constant):
    num_decay_steps: NonNegativeInt
    num_stable_steps: NonNegativeInt | None = None
    warmup_type: Shape = "linear"
    decay_type: Shape = "cosine"
    min_lr_ratio: float = Field(0.0, ge=0.0, le=1.0)
    num_cycles: PositiveFloat = 0.5


SETTINGS: dict[Kind, type[Constant]] = {
    "linear": Linear,
    "cosine": Cosine,
    "cosine_with_restarts": CosineWithRestarts,
    "polynomial": Polynomial,
    "constant": Constant,
    "constant_with_warmup": Constant,
    "inverse_sqrt": InverseSqrt,
    "cosine_with_min_lr": CosineWithMinLr,
    "cosine_warmup_with_min_lr": CosineWarmupWithMinLr,
    "warmup_stable_decay": WarmupStableDecay,
}
# Schedules of transformers that are no functions of the step.
_FOLLOWS_LOSSES = "follows the losses of the run, not the step alone, so that a resumed run would need its memory"
REFUSED = {"reduce_lr_on_plateau": _FOLLOWS_LOSSES, "greedy": _FOLLOWS_LOSSES}


def validate_schedule(kind: Kind, kwargs: Mapping[str, Any], peak: float) -> Constant:
    """Return `kwargs` as the settings of the schedule `kind`, whose highest learning rate is `peak`.

    Raises:
        ValueError: one line, for a key that the schedule does not take, or a wrong value.
    """
    model = SETTINGS[kind]
    try:
        settings = model.model_validate(dict(kwargs))
        settings.check(peak)
    except ValidationError as error:
        raise ValueError(f"train.lr_scheduler_kwargs of {kind}: {_problem(error)}{_accepted_keys(model)}") from None
    except ValueError as error:
        raise ValueError(f"train.lr_scheduler_kwargs of {kind}: {error}") from None
    return settings


def _problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"][:1])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"it has no {key}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    return f"{key} is {problem['input']!r}: {message[0].lower()}{message[1:]}" if key else message


def _accepted_keys(model: type[Constant]) -> str:
    return f"; it takes {', '.join(model.model_fields)}" if model.model_fields else "; it takes none"
