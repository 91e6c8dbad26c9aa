"""The `train` section, and the settings of each learning-rate schedule, under the names that transformers uses."""

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
    field_validator,
    model_validator,
)

from aliquot.config.data_section import PAIR_OBJECTIVES, Objective
from aliquot.config.section import Section, refuse, refuse_unused

Kind = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip
Shape = Literal["linear", "cosine", "1-sqrt"]


class Constant(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    def check(self, peak: float) -> None:
        """Raise ValueError if a setting of the schedule contradicts `peak`, the highest learning rate."""


class Cosine(Constant):
    num_cycles: PositiveFloat = 0.5


class CosineWithRestarts(Constant):
    num_cycles: PositiveInt = 1


class CosineWithMinLr(Cosine):
    min_lr: NonNegativeFloat | None = None
    min_lr_rate: float | None = Field(None, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def one_minimum(self) -> Self:
        refuse(
            (
                (self.min_lr is None) == (self.min_lr_rate is None),
                "give exactly one of min_lr (a rate) and min_lr_rate (a part of train.learning_rate)",
            )
        )
        return self

    def check(self, peak: float) -> None:
        if self.min_lr is not None and self.min_lr > peak:
            raise ValueError(f"min_lr {self.min_lr:g} is above train.learning_rate {peak:g}")


class CosineWarmupWithMinLr(CosineWithMinLr):
    warmup_lr_rate: float | None = Field(None, ge=0.0, le=1.0)


class Polynomial(Constant):
    lr_end: NonNegativeFloat = 1e-7
    power: PositiveFloat = 1.0

    def check(self, peak: float) -> None:
        refuse((self.lr_end >= peak, f"lr_end {self.lr_end:g} is not below train.learning_rate {peak:g}"))


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
    "linear": Constant,
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
    """Parse `train.lr_scheduler_kwargs` as the settings of schedule `kind`; `peak` is the highest learning rate.

    Raises ValueError, with a message of one line, for a key that the schedule does not have, or for a wrong value.
    """
    model = SETTINGS[kind]
    try:
        settings = model.model_validate(dict(kwargs))
        settings.check(peak)
    except ValidationError as error:
        keys = f"takes {', '.join(model.model_fields)}" if model.model_fields else "takes none"
        raise ValueError(f"train.lr_scheduler_kwargs of {kind}: {_problem(error)}; {kind} {keys}") from None
    except ValueError as error:
        raise ValueError(f"train.lr_scheduler_kwargs of {kind}: {error}") from None
    return settings


def _problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"][:1])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {key}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    return f"{key} is {problem['input']!r}: {message[0].lower()}{message[1:]}" if key else message


class TrainSection(Section):
    objective: Objective = "sft"
    """sft: cross-entropy. dpo, simpo and orpo train on pairs of answers: the chosen answer becomes more likely than the
    rejected one. kto trains on answers that are desirable or not."""
    beta: PositiveFloat = 0.1
    """dpo, kto: a larger beta keeps the model nearer to the model before training. simpo: the scale of the rewards.
    orpo: the weight of the odds ratio."""
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """The loss of dpo."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Probability that a pair is labelled the wrong way round; for simpo, and dpo with sigmoid or robust."""
    simpo_gamma: NonNegativeFloat = 0.5
    """The margin by which simpo's rewards of chosen answers are to exceed those of rejected ones."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable answers in kto's loss. If they are rarer than the others, raise it."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of the other answers in kto's loss."""
    disable_dropout: bool | None = None
    """Train without the dropout of model and adapter. Default: true for preferences, because the reference has no
    dropout, and false for sft."""
    max_steps: PositiveInt | None = None
    """Optimizer steps; wins over num_train_epochs."""
    num_train_epochs: PositiveFloat = 1.0
    """Passes over the training documents."""
    global_batch_size: PositiveInt | None = Field(None, le=1 << 24)
    """Sequences per optimizer step over all ranks; uneven spreads are allowed."""
    global_batch_tokens: PositiveInt | None = None
    """The same in tokens, rounded down to whole packed sequences; instead of global_batch_size."""
    per_device_train_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Sequences of a rank's micro-batch. auto: about the fastest that fits into memory, by the plan, for the same
    global batch. It is 1 if no global batch is set, or with dropout or a router's auxiliary loss: results would depend
    on the micro-batch. A resumed run keeps the choice if it fits and spreads evenly over the ranks."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per rank and step. Of this, the global batch and per_device_train_batch_size, two fix the third."""
    learning_rate: PositiveFloat = 5e-5
    """The highest rate, reached after warm-up."""
    lr_scheduler_type: Kind = "linear"
    """The schedule after warm-up, as transformers defines it; constant keeps the highest rate."""
    lr_scheduler_kwargs: dict[str, Any] = Field({})
    """Settings of the schedule by transformers' names, for example min_lr_rate or num_decay_steps."""
    warmup_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Fraction of all steps over which the rate rises from 0."""
    warmup_steps: NonNegativeInt | None = None
    """Wins over warmup_ratio."""
    weight_decay: NonNegativeFloat = 0.0
    """Not applied to norms and biases."""
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip gradients to this global norm; 0: do not clip."""
    gradient_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations to recompute in the backward pass. selective: all but those of linear layers and attention; full:
    whole layers. auto: no more than the run needs to fit into memory, by the plan; a resumed run keeps the
    choice if it fits."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of forward and backward pass; master weights and moments follow optimizer_states. auto: bf16 where
    matrix products are faster in bf16 (CPUs with AMX, AVX512-BF16 or ARM's BF16, GPUs from Ampere on) and with fp8,
    otherwise fp32; a resumed run keeps the choice. fp16 is not supported."""
    fp8: bool = False
    """Compute matrix products of large linear layers in fp8; one GPU from Ada or Hopper on, engine fsdp only."""
    optimizer_states: Literal["fp32", "bf16", "int8"] = "fp32"
    """Dtype of moments. bf16, int8: compressed moments, and gradient sums in bf16; engine host only."""
    compile: Literal["auto", "none", "layers"] = "auto"
    """layers: compile layers and update with torch.compile: the first step is slower, all others are faster. auto:
    compile if the plan says that this saves more than five minutes; a resumed run keeps the choice."""
    freeze: list[str] = Field([])
    """Names of weights to freeze, with * and ?: they have no gradient, moments or fp32 master weights."""
    logging_steps: PositiveInt = 1
    """Log metrics every N steps."""
    eval_steps: NonNegativeInt = 0
    """Evaluate every N steps; 0: only at the end."""
    eval_on_start: bool = False
    """Evaluate before the first step, too, for the record only."""
    early_stopping_patience: PositiveInt | None = None
    """End the run after N evaluations in a row without improvement. Default: never."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """How far metric_for_best_model must improve to count as an improvement for early stopping."""
    metric_for_best_model: Literal["loss", "rewards/accuracies", "rewards/margins"] = "loss"
    """What checkpoint.best and early stopping compare on the first evaluation set: the lowest loss, or for dpo, simpo
    and orpo the highest accuracy or margin."""

    @property
    def micro_batch_size(self) -> int:
        """The value of per_device_train_batch_size; 1 for auto, until a plan has chosen."""
        return 1 if self.per_device_train_batch_size == "auto" else self.per_device_train_batch_size

    @property
    def chosen_checkpointing(self) -> Literal["none", "selective", "full"]:
        """The value of gradient_checkpointing; none for auto, until a plan has chosen."""
        return "none" if self.gradient_checkpointing == "auto" else self.gradient_checkpointing

    @property
    def chosen_precision(self) -> Literal["bf16", "fp32"]:
        """The value of precision, for which a run and a plan replace auto before anything reads it."""
        assert self.precision != "auto", "train.precision: auto is read before its value is chosen"
        return self.precision

    @property
    def compute_itemsize(self) -> int:
        """The bytes of a number in forward and backward pass."""
        return 2 if self.chosen_precision == "bf16" else 4

    @field_validator("lr_scheduler_type", mode="before")
    @classmethod
    def refuse_stateful_schedule(cls, value: Any) -> Any:
        if isinstance(value, str) and value in REFUSED:
            raise ValueError(f"train.lr_scheduler_type {value} {REFUSED[value]}; choose one of {', '.join(SETTINGS)}")
        return value

    @property
    def drops(self) -> bool:
        """Whether dropout of the model and the adapter is active in training."""
        return self.objective == "sft" if self.disable_dropout is None else not self.disable_dropout

    @property
    def answers(self) -> int:
        """The number of answers, each with its prompt, that a sequence must hold together: 2 if it holds pairs."""
        return 2 if self.objective in PAIR_OBJECTIVES else 1

    @model_validator(mode="after")
    def check_combinations(self) -> Self:
        is_smoothed = self.objective == "dpo" and self.loss_type in ("sigmoid", "robust")
        readers = {
            "beta": self.objective != "sft",
            "loss_type": self.objective == "dpo",
            "label_smoothing": self.objective == "simpo" or is_smoothed,
            "simpo_gamma": self.objective == "simpo",
            "desirable_weight": self.objective == "kto",
            "undesirable_weight": self.objective == "kto",
            "metric_for_best_model": self.answers == 2,
        }
        kind = f" with loss_type: {self.loss_type}" if self.objective == "dpo" else ""
        why = f"has no effect on train.objective: {self.objective}{kind}: leave it out"
        refuse_unused(self, "train.", (([key], is_read, why) for key, is_read in readers.items()))
        refuse(
            (
                self.fp8 and self.precision == "fp32",
                "train.fp8 needs train.precision: bf16: set train.precision: bf16, or leave fp8 out",
            )
        )
        if self.fp8:
            self.precision = "bf16"
        validate_schedule(self.lr_scheduler_type, self.lr_scheduler_kwargs, self.learning_rate)
        return self
