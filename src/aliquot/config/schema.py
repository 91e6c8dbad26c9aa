"""The config of a run: every key that a YAML file or an override `section.key=value` may set, with its default.

The docstring below a key describes the key. `train` uses the names of Hugging Face's `TrainingArguments`. Each section
checks its keys; `RunConfig` has the checks that compare sections.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, WithJsonSchema, model_validator

from aliquot.config.adapter_section import AdapterSection
from aliquot.config.cluster_section import ClusterSection
from aliquot.config.data_section import DataSection as DataSection
from aliquot.config.deepspeed_json import fill_from_deepspeed
from aliquot.config.section import PATH, NodeCount, Section, SectionWithNodes, refuse
from aliquot.config.train_section import TrainSection as TrainSection
from aliquot.core.errors import UserError


class RunSection(Section):
    name: str = Field("run", min_length=1, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """Names the run directory."""
    directory: Annotated[Path, PATH] = Field(Path("runs"), json_schema_extra={"default": "runs/NAME"})
    """Directory for everything that the run writes. NAME is run.name."""
    seed: int = Field(42, ge=0, lt=2**63)
    """Seed of initial weights, document order and sampling."""


class ModelSection(Section):
    path: Annotated[str | None, PATH] = None
    """A Hugging Face model directory, such as an export or a checkpoint of a whole model, or a hub id."""
    config: Annotated[dict[str, Any] | Path | None, PATH] = None
    """From scratch: a dict with `model_type`, or the path of a config.json."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of exported weights. auto: as in the config of the source model; from scratch, train.precision."""
    add_tokens: list[str] = Field([])
    """New tokens. They take unused rows of the embedding first, with their values; further rows begin near the mean of
    the old rows."""
    add_special_tokens: list[str] = Field([])
    """New special tokens, which decoding leaves out."""

    @model_validator(mode="after")
    def check_source(self) -> Self:
        added, both = (*self.add_tokens, *self.add_special_tokens), ": set the other to null" if self.path else ""
        refuse(
            ("" in added, "a token of model.add_tokens or model.add_special_tokens is empty"),
            (
                (self.path is None) == (self.config is None),
                f"give exactly one of model.path (fine-tune) and model.config (from scratch){both}",
            ),
        )
        return self


_DEEPSPEED_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}


class ShardSection(Section):
    engine: Literal["auto", "host", "fsdp", "deepspeed"] = "auto"
    """host: states in host memory, communication between hosts once per step; on CPU weights once per NUMA node in
    shared memory, on GPUs as many layers as fit; fsdp: weights gathered layer by layer; deepspeed: ZeRO-3. auto:
    deepspeed if deepspeed_config is set, else on CPU host or fsdp by memory, and on GPUs fsdp."""
    collectives: Literal["auto", "shared_memory", "gloo"] = "auto"
    """Collectives among CPU ranks. auto: shared_memory where possible; with fsdp, for all-gathers within a host."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of gradients sent between hosts, and by engine fsdp between GPUs; ranks of one CPU host always sum in fp32.
    bf16: half the bytes of gradients sent, and with engine host half the memory of sums that wait for further
    micro-batches."""
    replicate: Literal["auto", "none", "nodes"] = "auto"
    """Engine fsdp on several nodes. none: all ranks divide weights and states. nodes: the ranks of each node divide
    them, every node holds all, and only gradients are sent between nodes, once a step. auto: none."""
    offload: Literal["none", "cpu", "disk"] = "none"
    """cpu: keep weights, gradients and moments of a GPU run in host memory; engines fsdp, deepspeed. disk: keep the
    state that does not fit into memory on disk, moments first, then gradient sums; engine host."""
    offload_directory: Annotated[Path | None, PATH] = None
    """A directory on a fast disk of each node, for offload: disk. Default: the run directory."""
    memory: PositiveFloat | None = None
    """GiB that the ranks of a node may use together. Default: the memory of the machine or container."""
    deepspeed_config: Annotated[dict[str, Any] | None, WithJsonSchema(_DEEPSPEED_SCHEMA)] = None
    """A DeepSpeed JSON (its path, or its content), which fills the keys that are not set."""


class CheckpointSection(Section):
    every: NonNegativeInt | Literal["auto"] = "auto"
    """Save every N steps; 0: only at the end. auto: about every half an hour by the plan, less often if training would
    wait for saves for more than 5 % of the time; a resumed run keeps the choice."""
    last: bool = True
    """Save a checkpoint at the end, too; false: the run ends with the export alone, from
    which no run resumes. To keep only the newest checkpoint,
    set keep: 1."""
    keep: PositiveInt = 2
    """Number of complete checkpoints to keep; older ones are removed."""
    resume: Annotated[str, PATH] = "auto"
    """auto: the newest complete checkpoint of this run, local or in the mirror; never: from the beginning; a PATH or
    URL: this checkpoint at first, and the newest of this run once the run has saved one."""
    mirror: str | None = Field(None, pattern=r"^[a-z][a-z0-9+.-]*://.+")
    """A URL, s3://BUCKET/PREFIX, file:///DIRECTORY or another that fsspec knows: each checkpoint is copied to
    <mirror>/<run.name>/ during training."""
    asynchronous: bool = Field(True, alias="async")
    """Write to disk during training."""
    buffer_bytes: NonNegativeInt = 256 << 20
    """Largest copy in memory of state that the next update would change before it is written; beyond it the update
    waits."""
    grace_s: PositiveFloat = Field(90.0, le=1e9)
    """Seconds from SIGTERM, SIGHUP or Ctrl-C to the end of the run, saved or not. They must suffice to finish the
    micro-batch and to save."""
    on_error: Literal["stop", "warn"] = "stop"
    """What to do if a checkpoint, its copy in the mirror, metrics or events cannot be written."""
    best: bool = False
    """Save the checkpoint that evaluates best by train.metric_for_best_model, keep it, and export it at the end."""
    export: bool = True
    """Write a Hugging Face export at the end of the run."""

    @property
    def save_steps(self) -> int:
        """The value of every, for which a run and a plan replace auto before anything reads it."""
        assert self.every != "auto", "checkpoint.every: auto is read before its value is chosen"
        return self.every


class LaunchSection(SectionWithNodes):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where torch sees a GPU."""
    ranks: Annotated[int, Field(gt=0, le=4096)] | Literal["auto"] = "auto"
    """Ranks on this machine. auto on GPUs: one per GPU. auto on CPU: for each NUMA node, one rank per core up to 4
    ranks, or one per 4 cores if that is more. Fewer ranks start if memory (2 GiB per rank) or the micro-batches of a
    step do not suffice; on one machine, `aliquot train` halves the ranks until they fit by the plan. Without
    train.global_batch_size, and with engines fsdp and deepspeed: one per NUMA node."""
    threads_per_rank: PositiveInt | None = None
    """Default: physical cores / local ranks."""
    nodes: NodeCount = 1
    """Machines; `aliquot train` is started on each of them. MIN:MAX, for example 2:4: an elastic run, whose nodes may
    come and go, and which needs no node_rank and no master."""
    node_rank: NonNegativeInt = 0
    """The number of this node, from 0."""
    master_address: str = "127.0.0.1"
    """The address of node 0."""
    master_port: int = Field(29500, ge=1, le=65535)
    """A free port of node 0; a run on one machine takes any free port itself."""
    join_timeout_s: PositiveFloat = Field(900.0, le=1e9)
    """Nodes and ranks wait this long for the others at start."""
    step_timeout_s: PositiveFloat = Field(1800.0, le=1e9)
    """In training, the run ends if a rank makes no progress for this long. In preparation and export, it ends if no
    rank computes, reads or writes for this long. On GPUs, it also ends if a collective takes longer."""


Dashboard = Literal["tensorboard", "wandb", "mlflow"]


class ObserveSection(Section):
    report_to: Annotated[
        list[Dashboard],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value, list[Dashboard] | Dashboard),
    ] = Field(["tensorboard"])
    """Dashboards for the metrics in metrics.jsonl, one or a list. tensorboard: files in tensorboard/ of the run
    directory. wandb: Weights & Biases. mlflow: an MLflow server. wandb and mlflow read their own environment variables.
    A server that does not answer delays the end of a run by up to 20 s, and nothing else."""
    prometheus: int | None = Field(None, ge=1, le=65535)
    """Port at which rank 0 serves metrics, under /metrics."""
    prometheus_host: str = "127.0.0.1"
    """Address at which the port is open; 0.0.0.0: to everybody."""
    profile: NonNegativeInt = 0
    """Trace N steps of every rank, after the first two, into <run>/profile/."""
    console: Literal["auto", "live", "plain", "verbose", "quiet"] = "auto"
    """auto: live on a terminal, otherwise a line per logged step. verbose: auto with gradient norm, FLOP/s, time by
    part, memory by phase, and traffic. quiet: only warnings and errors."""
    sample_prompt: str | None = Field(None, min_length=1)
    """Generate from this prompt at the end of the run; a chat model gets it as a user's message."""
    sample_tokens: PositiveInt = 64
    """Number of tokens to generate from sample_prompt."""


class RunConfig(Section):
    """A complete, validated run configuration. Its sections are attributes: `config.train.learning_rate`.

    Make one with `read_config`, or in Python: `RunConfig(model={"path": "..."}, data={"path": "..."}, ...)`. Wrong
    values then raise pydantic's ValidationError.
    """

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
        """Return the URL to which the checkpoints of this run are uploaded, or None."""
        return f"{self.checkpoint.mirror.rstrip('/')}/{self.run.name}" if self.checkpoint.mirror else None

    @property
    def base(self) -> Literal["bf16", "int8", "nf4"]:
        """Return the format of the frozen layers in memory."""
        return "bf16" if self.adapter is None else self.adapter.base

    @property
    def best_steps(self) -> int:
        """The steps between evaluations, each of which may be the best so far and cause a save; 0: none causes one."""
        return self.train.eval_steps if self.checkpoint.best else 0

    @property
    def offload_directory(self) -> Path:
        return self.shard.offload_directory or self.run.directory

    @model_validator(mode="before")
    @classmethod
    def fill_empty_sections(cls, values: Any) -> Any:
        """Replace a null section by its defaults: in YAML a section is null if all its keys are commented out."""
        if not isinstance(values, dict):
            return values
        sections = {key for key, field in cls.model_fields.items() if field.default is not None}
        return {key: {} if value is None and key in sections else value for key, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def fill_from_deepspeed_json(cls, values: Any) -> Any:
        """Fill keys from `shard.deepspeed_config` for a config that is created in Python.

        For a file, `read_config` has already filled the keys, with the line numbers of the file for errors.
        """
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
        launch, train, checkpoint, objective = self.launch, self.train, self.checkpoint, self.train.objective
        self.data.check_use(objective)
        has_adapter, new_tokens = self.adapter is not None, self.model.add_tokens or self.model.add_special_tokens
        saves = checkpoint.every not in (0, "auto") or checkpoint.last or checkpoint.best or checkpoint.export
        refuse(
            (
                launch.node_rank >= launch.most_nodes,
                f"launch.node_rank {launch.node_rank} is not below launch.nodes {launch.nodes}",
            ),
            (
                objective in ("dpo", "kto") and self.model.path is None,
                f"train.objective: {objective} compares the model with the one before training: give model.path",
            ),
            (
                self.data.streaming and train.max_steps is None,
                "data.streaming needs train.max_steps, because the length of the data is not known",
            ),
            *self._evaluation_problems(),
            # A short run with `every: auto` saves only at its end.
            (
                not saves,
                "the run would save nothing: checkpoint.last and checkpoint.export are both false. Set one of them to"
                " true",
            ),
            (
                has_adapter and new_tokens,
                "an adapter trains no embeddings, but new tokens need that: leave out adapter, or model.add_tokens",
            ),
            (has_adapter and train.freeze, "with an adapter the whole model is frozen: leave train.freeze out"),
        )
        if train.global_batch_tokens is not None:
            train.global_batch_size = self._sequences(train.global_batch_tokens)
            train.model_fields_set.add("global_batch_size")
        all_three = {"global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"}
        fixed = train.per_device_train_batch_size != "auto" and all_three <= train.model_fields_set
        refuse(
            *self._node_count_problems(),
            (
                fixed and train.global_batch_size and train.gradient_accumulation_steps,
                "train.global_batch_size, train.per_device_train_batch_size and train.gradient_accumulation_steps"
                " are all set: two of them fix the third, leave one out",
            ),
        )
        return self

    def with_positions(self, positions: int | None) -> Self:
        """Return the config for a model with this many positions, which limit the default of data.sequence_length.

        A length that the user has set remains; `ModelSource.check_length` refuses it if it is too long.
        """
        longest = self.data.sequence_length if positions is None else self.train.answers * positions
        if "sequence_length" in self.data.model_fields_set or longest >= self.data.sequence_length:
            return self
        train, data = self.train, self.data.model_copy(update={"sequence_length": longest})
        if train.global_batch_tokens is not None:
            train = train.model_copy(update={"global_batch_size": train.global_batch_tokens // longest})
        return self.model_copy(update={"data": data, "train": train})

    def _node_count_problems(self) -> Iterator[tuple[bool, str]]:
        """For elastic runs, require resuming, and a global batch that does not depend on the number of nodes."""
        for key, section in (("launch.nodes", self.launch), ("cluster.nodes", self.cluster)):
            if section is not None and section.is_elastic:
                yield (
                    self.train.global_batch_size is None,
                    f"{key} {section.nodes}: the batch of a step would change with the number of nodes:"
                    " give train.global_batch_size, or train.global_batch_tokens",
                )
                yield (
                    self.checkpoint.resume == "never",
                    f"{key} {section.nodes}: an elastic run continues from its newest checkpoint when its nodes change:"
                    " leave checkpoint.resume: never out",
                )

    def _evaluation_problems(self) -> Iterator[tuple[bool, str]]:
        """Require evaluation data for keys that evaluate, and several evaluations for keys that compare evaluations."""
        best, stops_early = self.checkpoint.best, self.train.early_stopping_patience is not None
        users = (("checkpoint.best", best), ("train.early_stopping_patience", stops_early),
                 ("train.eval_on_start", self.train.eval_on_start))  # fmt: skip
        for key in [key for key, is_set in users if is_set][:1]:
            yield (
                not self.data.has_evaluation,
                f"{key} needs evaluation data: set data.eval_path, eval_sources, eval_split or eval_fraction",
            )
            yield (
                (stops_early or best) and not self.train.eval_steps,
                f"{key} compares evaluations, but only one is made, at the end: set train.eval_steps",
            )

    def _sequences(self, tokens: int) -> int:
        """Return the number of packed sequences in a global batch of `tokens`."""
        length, sequences = self.data.sequence_length, self.train.global_batch_size
        refuse(
            (
                not self.data.packing,
                "train.global_batch_tokens needs data.packing: only packed sequences are equally long;"
                " give train.global_batch_size",
            ),
            (
                tokens < length,
                f"train.global_batch_tokens {tokens} is less than one sequence of data.sequence_length {length} tokens:"
                f" give at least {length}",
            ),
            (
                sequences not in (None, tokens // length),
                "give only one of train.global_batch_size and train.global_batch_tokens",
            ),
        )
        return tokens // length
