"""The run configuration: every key that a YAML file or `section.key=value` may set, with default and meaning.

`train` uses the names of Hugging Face's `TrainingArguments`. Checks of a key alone are in its section; checks that
compare sections are in `RunConfig`.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from aliquot.config import schedule_settings
from aliquot.config.adapter_section import AdapterSection
from aliquot.config.cluster_section import ClusterSection
from aliquot.config.data_section import DataSection as DataSection
from aliquot.config.deepspeed_json import fill_from_deepspeed
from aliquot.config.launch_section import LaunchSection as LaunchSection
from aliquot.config.launch_section import is_elastic
from aliquot.config.section import PATH, Section
from aliquot.core.errors import UserError


class RunSection(Section):
    name: str = Field(
        "run", min_length=1, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", description="Names the run directory."
    )
    directory: Annotated[Path, PATH] = Field(
        Path("runs"), description="Directory for everything that the run writes; default runs/<name>."
    )
    seed: int = Field(42, ge=0, lt=2**63, description="Seed of initial weights, document order and sampling.")


class ModelSection(Section):
    path: Annotated[str | None, PATH] = Field(None, description="A Hugging Face model directory, or a hub id.")
    config: Annotated[dict[str, Any] | Path | None, PATH] = Field(
        None, description="From scratch: a dict with `model_type`, or the path of a config.json."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="Dtype of exported weights. auto: as in the config of the source model; from scratch,"
        " train.precision.",
    )

    add_tokens: list[str] = Field(
        [], description="New tokens. Their rows in the embedding begin near the mean of the existing rows."
    )
    add_special_tokens: list[str] = Field([], description="New special tokens, which decoding leaves out.")

    @model_validator(mode="after")
    def check_source(self) -> Self:
        if "" in (*self.add_tokens, *self.add_special_tokens):
            raise ValueError("a token of model.add_tokens or model.add_special_tokens is empty")
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of model.path (fine-tune) and model.config (from scratch)")
        return self


class TrainSection(Section):
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps; wins over num_train_epochs.")
    num_train_epochs: PositiveFloat = Field(1.0, description="Passes over the training documents.")
    global_batch_size: PositiveInt | None = Field(
        None, le=1 << 24, description="Sequences per optimizer step over all ranks; uneven spreads are allowed."
    )
    global_batch_tokens: PositiveInt | None = Field(
        None, description="The same in tokens, rounded down to whole packed sequences; instead of global_batch_size."
    )
    per_device_train_batch_size: PositiveInt = Field(1, description="Sequences of a rank's micro-batch.")
    gradient_accumulation_steps: PositiveInt | None = Field(None, description="Micro-batches per rank and step.")
    learning_rate: PositiveFloat = Field(5e-5, description="The highest rate, reached after warm-up.")
    lr_scheduler_type: schedule_settings.Kind = Field(
        "linear", description="The schedule after warm-up, as transformers defines it; constant keeps the highest rate."
    )
    lr_scheduler_kwargs: dict[str, Any] = Field(
        {}, description="Settings of the schedule by transformers' names, for example min_lr_rate or num_decay_steps."
    )
    warmup_ratio: float = Field(
        0.0, ge=0.0, le=1.0, description="Fraction of all steps over which the rate rises from 0."
    )
    warmup_steps: NonNegativeInt | None = Field(None, description="Wins over warmup_ratio.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Not applied to norms and biases.")
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: NonNegativeFloat = Field(1.0, description="Clip gradients to this global norm; 0: do not clip.")
    gradient_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations to recompute in the backward pass. selective: all but those of linear layers and"
        " attention; full: whole layers.",
    )
    precision: Literal["bf16", "fp32"] = Field(
        "bf16",
        description="Precision of forward and backward pass; master weights and moments follow optimizer_states.",
    )
    optimizer_states: Literal["fp32", "bf16", "int8"] = Field(
        "fp32",
        description="Dtype of moments. bf16, int8: compressed moments, and gradient sums in bf16; engine host only.",
    )
    compile: Literal["none", "layers"] = Field(
        "none",
        description="layers: compile layers and update with torch.compile; the first step is slower, later steps 2 to"
        " 18 % (AMX) faster.",
    )
    freeze: list[str] = Field(
        [],
        description="Names of weights to freeze, with * and ?: they have no gradient, moments or fp32 master weights.",
    )
    logging_steps: PositiveInt = Field(1, description="Log metrics every N steps.")
    eval_steps: NonNegativeInt = Field(0, description="Evaluate every N steps; 0: only at the end.")
    eval_on_start: bool = Field(False, description="Evaluate before the first step, too, for the record only.")
    early_stopping_patience: PositiveInt | None = Field(
        None, description="End the run after N evaluations in a row without improvement. Default: never."
    )
    early_stopping_threshold: NonNegativeFloat = Field(
        0.0, description="How far the evaluation loss must fall to count as an improvement for early stopping."
    )

    @field_validator("lr_scheduler_type", mode="before")
    @classmethod
    def refuse_stateful_schedule(cls, value: Any) -> Any:
        if isinstance(value, str) and value in schedule_settings.REFUSED:
            raise ValueError(
                f"it {schedule_settings.REFUSED[value]}; choose one of {', '.join(schedule_settings.SETTINGS)}"
            )
        return value

    @model_validator(mode="after")
    def check_schedule(self) -> Self:
        schedule_settings.validate_schedule(self.lr_scheduler_type, self.lr_scheduler_kwargs, self.learning_rate)
        return self


class ShardSection(Section):
    engine: Literal["auto", "host", "fsdp", "deepspeed"] = Field(
        "auto",
        description="host: CPU, weights once per NUMA node in shared memory; fsdp: weights gathered layer by layer;"
        " deepspeed: ZeRO-3. auto: deepspeed if deepspeed_config is set, else host or fsdp by memory.",
    )
    collectives: Literal["auto", "shared_memory", "gloo"] = Field(
        "auto",
        description="Collectives among CPU ranks. auto: shared_memory where possible; with fsdp on one host only.",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Dtype of gradients sent between hosts; ranks of one CPU host always sum in fp32. bf16: half the"
        " bytes sent, and half the memory of sums that wait on a host for further micro-batches.",
    )
    offload: Literal["none", "cpu", "disk"] = Field(
        "none",
        description="cpu: keep weights, gradients and moments of a GPU run in host memory; engines fsdp, deepspeed."
        " disk: keep the state that does not fit into memory on disk, moments first, then gradient sums; engine host.",
    )
    offload_directory: Annotated[Path | None, PATH] = Field(
        None, description="A directory on a fast disk of each node, for offload: disk. Default: the run directory."
    )
    memory: PositiveFloat | None = Field(
        None,
        description="GiB that the ranks of a node may use together. Default: the memory of the machine or container.",
    )
    deepspeed_config: dict[str, Any] | None = Field(
        None, description="A DeepSpeed JSON (its path, or its content), which fills the keys that are not set."
    )


class CheckpointSection(Section):
    every: NonNegativeInt = Field(0, description="Save every N steps; 0: only at the end.")
    last: bool = Field(True, description="Save at the end, too; false: the run ends with the export alone.")
    keep: PositiveInt = Field(2, description="Number of complete checkpoints to keep; older ones are removed.")
    resume: Annotated[str, PATH] = Field(
        "auto",
        description="auto: the newest complete checkpoint of this run, local or in the mirror; never; a PATH or URL.",
    )
    mirror: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.-]*://.+",
        description="A URL, s3://BUCKET/PREFIX, file:///DIRECTORY or another that fsspec knows: each checkpoint is"
        " copied to <mirror>/<run.name>/ during training.",
    )
    asynchronous: bool = Field(True, alias="async", description="Write to disk during training.")
    buffer_bytes: NonNegativeInt = Field(
        256 << 20,
        description="Largest copy in memory of state that the next update would change before it is written;"
        " beyond it the update waits.",
    )
    grace_s: PositiveFloat = Field(
        90.0, le=1e9, description="Time after SIGTERM or Ctrl-C to finish the step, save and end."
    )
    on_error: Literal["stop", "warn"] = Field(
        "stop", description="What to do if a checkpoint, its copy in the mirror, metrics or events cannot be written."
    )
    best: bool = Field(
        False, description="Save the checkpoint with the lowest evaluation loss, keep it, and export it at the end."
    )
    export: bool = Field(True, description="Write a Hugging Face export at the end of the run.")


class ObserveSection(Section):
    report_to: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        ["tensorboard"],
        description="Dashboards for the metrics in metrics.jsonl: tensorboard/ in the run directory, Weights & Biases,"
        " an MLflow server. The latter two read their own environment variables; no server stops or slows a run.",
    )
    prometheus: int | None = Field(
        None, ge=1, le=65535, description="Port at which rank 0 serves metrics, under /metrics."
    )
    prometheus_host: str = Field("127.0.0.1", description="Address at which the port is open; 0.0.0.0: to everybody.")
    profile: NonNegativeInt = Field(
        0, description="Trace N steps of every rank, after the first two, into <run>/profile/."
    )
    console: Literal["auto", "live", "plain", "quiet"] = Field("auto", description="auto: live on a terminal.")
    sample_prompt: str | None = Field(
        None,
        min_length=1,
        description="Generate from this prompt at the end of the run; a chat model gets it as a user's message.",
    )
    sample_tokens: PositiveInt = Field(64, description="Number of tokens to generate from sample_prompt.")

    @model_validator(mode="before")
    @classmethod
    def accept_one_dashboard(cls, values: Any) -> Any:
        if isinstance(values, dict) and "tensorboard" in values:
            raise ValueError("observe.tensorboard is observe.report_to now: [tensorboard], or [] for false")
        if isinstance(values, dict) and isinstance(values.get("report_to"), str):
            values = {**values, "report_to": [values["report_to"]]}
        return values


class RunConfig(Section):
    """A complete, validated run configuration."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    train: TrainSection = TrainSection()
    shard: ShardSection = ShardSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observe: ObserveSection = ObserveSection()
    launch: LaunchSection = LaunchSection()
    adapter: AdapterSection | None = None
    cluster: ClusterSection | None = None

    @property
    def mirror(self) -> str | None:
        """The URL to which the checkpoints of this run are copied."""
        return f"{self.checkpoint.mirror.rstrip('/')}/{self.run.name}" if self.checkpoint.mirror else None

    @property
    def offload_directory(self) -> Path:
        return self.shard.offload_directory or self.run.directory

    @model_validator(mode="before")
    @classmethod
    def fill_empty_sections(cls, values: Any) -> Any:
        """Give a section that is null its defaults: in YAML a section is null if all its keys are commented out."""
        if not isinstance(values, dict):
            return values
        sections = set(cls.model_fields) - {"adapter", "cluster"}  # these are None by default
        return {key: {} if value is None and key in sections else value for key, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def fill_from_deepspeed_json(cls, values: Any) -> Any:
        """Fill a configuration made in Python; `read_config` has already filled that of a file, naming its lines."""
        if not isinstance(values, dict) or not isinstance(values.get("shard"), dict):
            return values
        values = deepcopy(values)
        try:
            fill_from_deepspeed(values, {})
        except UserError as error:
            raise ValueError(str(error)) from None
        return values

    @model_validator(mode="after")
    def fill_and_check(self) -> Self:
        if "directory" not in self.run.model_fields_set:
            self.run.directory = Path("runs") / self.run.name
            self.run.model_fields_set.add("directory")
        if self.launch.node_rank >= self.launch.most_nodes:
            raise ValueError(f"launch.node_rank {self.launch.node_rank} is not below launch.nodes {self.launch.nodes}")
        self._check_evaluations()
        checkpoint = self.checkpoint
        if not (checkpoint.every or checkpoint.last or checkpoint.best or checkpoint.export):
            raise ValueError("the run would save nothing: checkpoint.last and checkpoint.export are both false")
        train = self.train
        if self.adapter is not None and self.model.path is None:
            raise ValueError("an adapter needs a pretrained model: give model.path")
        if self.adapter is not None and (self.model.add_tokens or self.model.add_special_tokens):
            raise ValueError("an adapter does not train the model's weights, and new tokens need that: leave one out")
        if self.adapter is not None and train.freeze:
            raise ValueError("with an adapter the whole model is frozen: leave train.freeze out")
        if train.global_batch_tokens is not None:
            train.global_batch_size = self._sequences(train.global_batch_tokens)
            train.model_fields_set.add("global_batch_size")
        self._check_node_counts()
        all_three = {"global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"}
        if all_three <= train.model_fields_set and train.global_batch_size and train.gradient_accumulation_steps:
            raise ValueError(
                "train.global_batch_size, train.per_device_train_batch_size and train.gradient_accumulation_steps"
                " are all set: two of them fix the third, leave one out"
            )
        return self

    def _check_node_counts(self) -> None:
        """Require a global batch that does not depend on the number of nodes, and resuming, for elastic runs."""
        counts = {"launch.nodes": self.launch.nodes}
        if self.cluster is not None:
            counts["cluster.nodes"] = self.cluster.nodes
        for key, nodes in counts.items():
            if is_elastic(nodes) and self.train.global_batch_size is None:
                raise ValueError(
                    f"{key} {nodes}: the batch of a step would change with the number of nodes:"
                    " give train.global_batch_size, or train.global_batch_tokens"
                )
            if is_elastic(nodes) and self.checkpoint.resume == "never":
                raise ValueError(
                    f"{key} {nodes}: an elastic run continues from its newest checkpoint when its nodes change:"
                    " leave checkpoint.resume: never out"
                )

    def _check_evaluations(self) -> None:
        """Require evaluation data, and several evaluations, for the keys that compare evaluations."""
        stops_early = self.train.early_stopping_patience is not None
        users = {
            "checkpoint.best": self.checkpoint.best,
            "train.early_stopping_patience": stops_early,
            "train.eval_on_start": self.train.eval_on_start,
        }
        key = next((key for key, is_set in users.items() if is_set), None)
        if key is not None and not self.data.has_evaluation:
            raise ValueError(
                f"{key} needs evaluation data: set data.eval_path, eval_sources, eval_split or eval_fraction"
            )
        if (stops_early or self.checkpoint.best) and not self.train.eval_steps:
            raise ValueError(f"{key} compares evaluations, but only one is made, at the end: set train.eval_steps")

    def _sequences(self, tokens: int) -> int:
        """Return the number of packed sequences in a global batch of `tokens`."""
        length, sequences = self.data.sequence_length, self.train.global_batch_size
        if not self.data.packing:
            raise ValueError(
                "train.global_batch_tokens needs data.packing: only packed sequences are equally long;"
                " give train.global_batch_size"
            )
        if tokens < length:
            raise ValueError(
                f"train.global_batch_tokens {tokens} is less than one sequence of data.sequence_length {length} tokens:"
                f" give at least {length}"
            )
        if sequences is not None and sequences != tokens // length:
            raise ValueError("give only one of train.global_batch_size and train.global_batch_tokens")
        return tokens // length
