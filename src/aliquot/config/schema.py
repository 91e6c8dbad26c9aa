"""The run configuration: every key that a YAML file or `section.key=value` may set, with its default and its meaning.

Where Hugging Face `TrainingArguments` has a name for a thing, `train` uses that name.
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
        Path("runs"), description="Where everything of this run is written; default runs/<name>."
    )
    seed: int = Field(42, ge=0, lt=2**63, description="Fixes initial weights, document order and sampling.")


class ModelSection(Section):
    path: Annotated[str | None, PATH] = Field(None, description="A Hugging Face model directory, or a hub id.")
    config: Annotated[dict[str, Any] | Path | None, PATH] = Field(
        None, description="From scratch: a dict with `model_type`, or the path of a config.json."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="Dtype of exported weights. auto: what the source's config names; from scratch, the precision.",
    )

    add_tokens: list[str] = Field(
        [], description="New tokens: the vocabulary grows, and the new rows begin near the mean of the old ones."
    )
    add_special_tokens: list[str] = Field([], description="The same for tokens that decoding leaves out.")

    @model_validator(mode="after")
    def one_source(self) -> Self:
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
        None, description="Instead, in tokens: as many packed sequences as hold so many, a whole number of them."
    )
    per_device_train_batch_size: PositiveInt = Field(1, description="Sequences of a micro-batch, which is one rank's.")
    gradient_accumulation_steps: PositiveInt | None = Field(None, description="Micro-batches per rank and step.")
    learning_rate: PositiveFloat = Field(5e-5, description="The highest, after warm-up.")
    lr_scheduler_type: schedule_settings.Kind = Field(
        "linear", description="After warm-up, as transformers defines it; constant stays there."
    )
    lr_scheduler_kwargs: dict[str, Any] = Field(
        {}, description="By transformers' names: min_lr_rate, num_decay_steps, ..., as the schedule takes them."
    )
    warmup_ratio: float = Field(0.0, ge=0.0, le=1.0, description="Part of all steps over which the rate rises from 0.")
    warmup_steps: NonNegativeInt | None = Field(None, description="Wins over warmup_ratio.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Not applied to norms and biases.")
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: NonNegativeFloat = Field(1.0, description="Clip to this global norm; 0 = do not clip.")
    gradient_checkpointing: Literal["none", "selective", "full"] = Field(
        "none",
        description="Recompute in the backward pass. selective: all but linear layers and attention; full: layers.",
    )
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="Of computing; master weights and moments are fp32 either way, see optimizer_states."
    )
    optimizer_states: Literal["fp32", "bf16", "int8"] = Field(
        "fp32", description="bf16, int8: frugal moments, and gradient sums in bf16; engine host only."
    )
    compile: Literal["none", "layers"] = Field(
        "none",
        description="layers: layers and update by torch.compile; a slower first step, then 2 to 18 % (AMX) faster.",
    )
    freeze: list[str] = Field(
        [], description="Names of weights that learn nothing, with * and ?: no gradient, no moments, no fp32 master."
    )
    logging_steps: PositiveInt = Field(1, description="A line of metrics every so many steps.")
    eval_steps: NonNegativeInt = Field(0, description="Evaluate every so many steps; 0 = only at the end.")
    eval_on_start: bool = Field(False, description="Evaluate before the first step, too; it is recorded, no more.")
    early_stopping_patience: PositiveInt | None = Field(
        None, description="End after so many evaluations in a row without improvement. Default: never."
    )
    early_stopping_threshold: NonNegativeFloat = Field(
        0.0, description="By how much the evaluation loss must fall to count as an improvement there."
    )

    @field_validator("lr_scheduler_type", mode="before")
    @classmethod
    def function_of_the_step(cls, value: Any) -> Any:
        if isinstance(value, str) and value in schedule_settings.REFUSED:
            raise ValueError(
                f"it {schedule_settings.REFUSED[value]}; choose one of {', '.join(schedule_settings.SETTINGS)}"
            )
        return value

    @model_validator(mode="after")
    def schedule(self) -> Self:
        schedule_settings.validate_schedule(self.lr_scheduler_type, self.lr_scheduler_kwargs, self.learning_rate)
        return self


class ShardSection(Section):
    engine: Literal["auto", "host", "fsdp", "deepspeed"] = Field(
        "auto",
        description="host: CPU, weights once per NUMA node in shared memory; fsdp: gathered layer by layer;"
        " deepspeed: ZeRO-3, what auto takes where deepspeed_config is set.",
    )
    collectives: Literal["auto", "shared_memory", "gloo"] = Field(
        "auto", description="Among CPU ranks. auto: shared_memory where it can be; in fsdp that is one host."
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Of gradients between hosts; ranks of a CPU host sum in fp32 either way. bf16: half the bytes,"
        " and half the memory of sums that wait on a host for further micro-batches.",
    )
    offload: Literal["none", "cpu", "disk"] = Field(
        "none",
        description="cpu: weights, gradients and moments of a GPU run in host memory; engines fsdp, deepspeed."
        " disk: what does not fit into memory, moments first, then gradient sums; engine host.",
    )
    offload_directory: Annotated[Path | None, PATH] = Field(
        None, description="On a fast disk of each node, for offload: disk. Default: the run directory."
    )
    memory: PositiveFloat | None = Field(
        None, description="GiB that a node's ranks may hold together, where that is less than there is."
    )
    deepspeed_config: dict[str, Any] | None = Field(
        None, description="A DeepSpeed JSON (its path, or its content): fills the keys above that are silent."
    )


class CheckpointSection(Section):
    every: NonNegativeInt = Field(0, description="Save every so many steps; 0 = only at the end.")
    last: bool = Field(True, description="Save at the end, too; false: what is left there is the export.")
    keep: PositiveInt = Field(2, description="Complete checkpoints kept; older ones are removed.")
    resume: Annotated[str, PATH] = Field(
        "auto",
        description="auto: the newest complete checkpoint of this run, here or in the mirror; never; a PATH or URL.",
    )
    mirror: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.-]*://.+",
        description="A URL, s3://BUCKET/PREFIX, file:///DIRECTORY or another that fsspec knows: each checkpoint is"
        " copied to <mirror>/<run.name>/ beside training.",
    )
    asynchronous: bool = Field(True, alias="async", description="Write to disk while training goes on.")
    buffer_bytes: NonNegativeInt = Field(
        256 << 20, description="Copied at most when the next update comes before all is written; beyond, it waits."
    )
    grace_s: PositiveFloat = Field(90.0, le=1e9, description="After SIGTERM or Ctrl-C: finish the step, save, end.")
    on_error: Literal["stop", "warn"] = Field(
        "stop", description="When a checkpoint, its copy in the mirror, metrics or events cannot be written."
    )
    best: bool = Field(
        False, description="Save what evaluates best, keep it beside the newest, and export it at the end."
    )
    export: bool = Field(True, description="Write a Hugging Face export at the end of the run.")


class ObserveSection(Section):
    report_to: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        ["tensorboard"],
        description="Where the curve goes beside metrics.jsonl: tensorboard/ in the run directory, Weights & Biases, an"
        " MLflow server. The latter two are told where by their own variables; no server stops or slows a run.",
    )
    prometheus: int | None = Field(
        None, ge=1, le=65535, description="Rank 0 serves the metrics at this port, under /metrics."
    )
    prometheus_host: str = Field("127.0.0.1", description="Where the port is open; 0.0.0.0: to everybody.")
    profile: NonNegativeInt = Field(
        0, description="Trace so many steps of every rank, after the first two, into <run>/profile/."
    )
    console: Literal["auto", "live", "plain", "quiet"] = Field("auto", description="auto: live on a terminal.")
    sample_prompt: str | None = Field(
        None,
        min_length=1,
        description="Generate from this prompt at the end of the run; of chats, as what a user says.",
    )
    sample_tokens: PositiveInt = Field(64, description="Tokens of that sample.")

    @model_validator(mode="before")
    @classmethod
    def one_or_several(cls, values: Any) -> Any:
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
        """Where the checkpoints of this run are copied to."""
        return f"{self.checkpoint.mirror.rstrip('/')}/{self.run.name}" if self.checkpoint.mirror else None

    @property
    def offload_directory(self) -> Path:
        return self.shard.offload_directory or self.run.directory

    @model_validator(mode="before")
    @classmethod
    def empty_sections(cls, values: Any) -> Any:
        """A section whose keys are all commented out is null in YAML and means its defaults."""
        if not isinstance(values, dict):
            return values
        sections = set(cls.model_fields) - {"adapter", "cluster"}  # which are none by default
        return {key: {} if value is None and key in sections else value for key, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def deepspeed_fills(cls, values: Any) -> Any:
        """For a config made in Python; for a file `read_config` has done it already, and could name its lines."""
        if not isinstance(values, dict) or not isinstance(values.get("shard"), dict):
            return values
        values = deepcopy(values)
        try:
            fill_from_deepspeed(values, {})
        except UserError as error:
            raise ValueError(str(error)) from None
        return values

    @model_validator(mode="after")
    def fill(self) -> Self:
        if "directory" not in self.run.model_fields_set:
            self.run.directory = Path("runs") / self.run.name
            self.run.model_fields_set.add("directory")
        if self.launch.node_rank >= self.launch.most_nodes:
            raise ValueError(f"launch.node_rank {self.launch.node_rank} is not below launch.nodes {self.launch.nodes}")
        self._check_evaluations()
        saving = self.checkpoint
        if not (saving.every or saving.last or saving.best or saving.export):
            raise ValueError(
                "nothing would be left of what was trained: checkpoint.last and checkpoint.export are false"
            )
        train = self.train
        if self.adapter is not None and self.model.path is None:
            raise ValueError("an adapter is learned beside a pretrained model: give model.path")
        if self.adapter is not None and (self.model.add_tokens or self.model.add_special_tokens):
            raise ValueError("an adapter leaves the model as it is: new tokens are for training its weights")
        if self.adapter is not None and train.freeze:
            raise ValueError("with an adapter all of the model is frozen: leave train.freeze out")
        if train.global_batch_tokens is not None:
            train.global_batch_size = self._sequences_of(train.global_batch_tokens)
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
        """The batch must not change with the nodes."""
        counts = {"launch.nodes": self.launch.nodes}
        if self.cluster is not None:
            counts["cluster.nodes"] = self.cluster.nodes
        for key, nodes in counts.items():
            if is_elastic(nodes) and self.train.global_batch_size is None:
                raise ValueError(
                    f"{key} {nodes}: with nodes that come and go the batch of a step would change:"
                    " give train.global_batch_size, or train.global_batch_tokens"
                )
            if is_elastic(nodes) and self.checkpoint.resume == "never":
                raise ValueError(
                    f"{key} {nodes}: each time that nodes go or come the run goes on from its newest checkpoint:"
                    " leave checkpoint.resume: never out"
                )

    def _check_evaluations(self) -> None:
        """What goes by evaluations needs some."""
        data, train = self.data, self.train
        stops = train.early_stopping_patience is not None
        asked = [
            key
            for key, wanted in (
                ("checkpoint.best", self.checkpoint.best),
                ("train.early_stopping_patience", stops),
                ("train.eval_on_start", train.eval_on_start),
            )
            if wanted
        ]
        if asked and not (data.eval_path or data.eval_split or data.eval_fraction or data.eval_sources):
            raise ValueError(
                f"{asked[0]} needs something to evaluate on: data.eval_path, eval_sources, eval_split or eval_fraction"
            )
        if (stops or self.checkpoint.best) and not train.eval_steps:
            raise ValueError(f"{asked[0]} compares evaluations, and there is one, at the end: set train.eval_steps")

    def _sequences_of(self, tokens: int) -> int:
        length, written = self.data.sequence_length, self.train.global_batch_size
        if not self.data.packing:
            raise ValueError(
                "train.global_batch_tokens needs data.packing: only packed sequences are equally long;"
                " give train.global_batch_size"
            )
        if tokens < length:
            raise ValueError(
                f"train.global_batch_tokens {tokens} is less than one sequence of data.sequence_length {length} tokens:"
                " a step is at least one"
            )
        if written is not None and written != tokens // length:
            raise ValueError("give only one of train.global_batch_size and train.global_batch_tokens")
        return tokens // length
