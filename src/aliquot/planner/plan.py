"""The result of the planner: plain numbers, without torch, so that any package may read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pydantic import TypeAdapter

from aliquot.catalogue.instances import instance
from aliquot.core.number_format import count_of, duration, short
from aliquot.engines.engine_plan import OnDisk, Unsharded

_LARGE_MODEL = 100_000_000  # parameters from which on training from random weights is more often a mistake than a wish
_MUCH_WAITING = 10.0  # times the time of matrix products: a step that waits so long is a mistake of the settings
_MUCH_IDLE = 0.3  # of the ranks
_MUCH_SAVING_S = 60.0  # in a run whose steps take less
DISK_PART = 0.05  # waiting for disks below this fraction of a step is negligible


@dataclass(frozen=True)
class PhaseMemory:
    """The peak memory of a rank during one phase of the ledger."""

    name: str
    private_bytes: Mapping[str, int]  # of the largest rank, by category
    shared_bytes: Mapping[str, int]  # of all ranks of a host together, by category

    def per_rank(self, ranks_per_node: int) -> int:
        """Return private bytes and the rank's share of shared bytes: PSS."""
        return sum(self.private_bytes.values()) + -(-sum(self.shared_bytes.values()) // ranks_per_node)


@dataclass(frozen=True)
class Losses:
    """Fractions of the time of a run that the number of nodes costs, beside the time of a step in the plan."""

    messages: float = 0.0  # latency, and CPU time per message, however short
    stragglers: float = 0.0  # a step takes as long as its slowest rank
    lost_nodes: float = 0.0  # new nodes, and repeated steps, with the best interval between checkpoints
    idle_ranks: float = 0.0  # ranks that have no sequence in a step

    @property
    def goodput(self) -> float:
        """The remaining fraction of the time."""
        return math.prod(1 - loss for loss in self.shares.values())

    @property
    def shares(self) -> Mapping[str, float]:
        """The losses by a name for people."""
        return {
            "messages": self.messages,
            "stragglers": self.stragglers,
            "lost nodes": self.lost_nodes,
            "idle ranks": self.idle_ranks,
        }

    @property
    def words(self) -> str:
        """Text for people: every loss, and the remaining fraction of the time."""
        shares = ", ".join(f"{name} {loss:.1%}" for name, loss in self.shares.items())
        return f"{self.goodput:.0%} of the time is left after {shares}"


@dataclass(frozen=True)
class Plan:
    """The plan of one run. Memory in bytes, times in seconds, money in US dollars.

    The fields have the names that `aliquot plan --json` prints; `as_json` returns them all.
    """

    model: str
    parameters: int
    engine: str
    precision: str  # bf16 | fp32
    device: str  # cpu | cuda
    nodes: int
    ranks_per_node: int
    threads_per_rank: int
    instance: str | None  # EC2 type; None: other machines
    phases: tuple[PhaseMemory, ...]  # of GPU memory if ranks compute on GPUs, otherwise of host memory
    shm_bytes_per_node: int  # in /dev/shm (DeepSpeed, NCCL); engine host needs none
    limit_bytes_per_node: int  # for all ranks of a node and the processes in `beside_bytes`
    wire_bytes_per_step: int  # sent between hosts by all ranks
    local_bytes_per_step: int  # sent through sockets among ranks of the same host, on all hosts
    disk_read_bytes: int  # by all ranks at start
    checkpoint_bytes: int  # written by all ranks per checkpoint
    steps: int  # 0: unknown until the data are read
    tokens_per_step: float  # real tokens, without padding
    step_s: float
    bottleneck: str  # such as "compute-bound", and the change that helps most
    rates: str  # source of the machine's rates: measured on a date, or estimated
    usd_per_hour: float | None  # of all nodes, on demand
    compile: str = "none"  # layers | none
    fp8: bool = False  # linear layers multiply in fp8; memory and time are planned as for bf16
    micro_batch: int = 1  # sequences of a rank's forward pass
    gradient_checkpointing: str = "none"  # none | selective | full
    host_phases: tuple[PhaseMemory, ...] = ()  # phases of host memory, if ranks compute on GPUs
    host_limit_bytes_per_node: int = 0
    off_by: float = 1.0  # factor by which the time of a step may be wrong, either way
    evaluations: int = 0  # evaluations whose number of sequences is known
    evaluation_s: float = 0.0  # seconds of one evaluation
    uncounted_evaluations: int = 0  # evaluations whose number of sequences is unknown until the data are read
    reference_s: float = 0.0  # log-probabilities before training; 0 also if the number of sequences is unknown
    save_steps: int = 0  # steps between saves; 0: the run saves only at its end
    checkpoints: int = 1  # the most checkpoints that are stored at once
    saves: int = 0  # saves during which training waits
    saves_beside: int = 0  # saves that overlap with steps
    stall_s: float = 0.0  # total time that steps wait for overlapping saves
    save_s: float = 0.0  # seconds of one save, at the rate of storage
    export_s: float = 0.0
    export_bytes: int = 0
    storage_bytes_per_s: float = 0.5e9  # written by all nodes together
    storage_measured: bool = False
    network_bytes_per_s: float = 1e9  # sent by a node to other nodes
    gpus_per_node: int = 0
    beside_bytes: int = 0  # memory per node of the launcher and of dashboard clients
    on_disk: OnDisk = field(default_factory=OnDisk)  # states that do not fit into memory, with `shard.offload: disk`
    copied_layers: int = 0  # decoder layers that engine host copies to a GPU for each use
    unsharded: Unsharded = field(default_factory=Unsharded)  # tensors that engine fsdp keeps unsharded in a step
    replicate: str = "none"  # none | nodes: every node holds all weights and states, and only gradients cross nodes
    scratch_bytes_per_node: int = 0  # size of the states on disk
    scratch_moved_per_step: int = 0  # bytes that all ranks read from disk and write to disk
    scratch_written_per_step: int = 0
    disk_s: float = 0.0  # the part of `step_s` that waits for disks
    kernel_shapes: int | None = None  # upper bound on matrix product shapes of a rank; None: no bound, or on GPUs
    disk_batch: int | None = None  # smallest global batch that waits at most DISK_PART for disks; None: no batch
    waiting_factor: float = 1.0  # the wait for network or disk, in times of matrix products, if it is the bottleneck
    losses: Losses = field(default_factory=Losses)  # of the time of a run on many nodes
    fees_usd_per_hour: float = 0.0  # of what `cluster` needs beside the nodes of the job
    trained_parameters: int | None = None  # None: an older version made the plan
    base: str = "bf16"  # format of the frozen layers: bf16 (not compressed) | int8 | nf4

    @property
    def step_with_messages_s(self) -> float:
        """Seconds of a step with the latency and the CPU time of its messages."""
        return self.step_s / (1 - self.losses.messages)

    @property
    def choices(self) -> dict[str, object]:
        """The chosen value of each `section.key` that may be `auto` until a run is planned."""
        return {
            "train.precision": self.precision,
            "train.gradient_checkpointing": self.gradient_checkpointing,
            "train.compile": self.compile,
            "train.per_device_train_batch_size": self.micro_batch,
            "shard.replicate": self.replicate,
            "checkpoint.every": self.save_steps,
        }

    @property
    def peak(self) -> PhaseMemory:
        """The phase in which a rank needs the most memory."""
        return max(self.phases, key=lambda phase: phase.per_rank(self.ranks_per_node))

    @property
    def peak_bytes_per_rank(self) -> int:
        """The memory that one rank needs: GPU memory if ranks compute on GPUs, otherwise host memory."""
        return self.peak.per_rank(self.ranks_per_node)

    @property
    def limit_bytes(self) -> int:
        """The memory that one rank may use."""
        return max(0, self.limit_bytes_per_node - self.beside_bytes) // self.ranks_per_node

    @property
    def unused_bytes(self) -> int:
        """The memory of one rank that is free between two passes of training, when there are no activations."""
        return self.limit_bytes - self.peak_bytes_per_rank + self.peak.private_bytes.get("activations", 0)

    @property
    def host_peak_bytes_per_rank(self) -> int:
        """Host memory of a rank that computes on a GPU; otherwise 0."""
        return max((phase.per_rank(self.ranks_per_node) for phase in self.host_phases), default=0)

    @property
    def host_limit_bytes(self) -> int:
        return self.host_limit_bytes_per_node // self.ranks_per_node

    @property
    def fits(self) -> bool:
        """Whether the run fits into memory."""
        return self.peak_bytes_per_rank <= self.limit_bytes and self.host_peak_bytes_per_rank <= self.host_limit_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together, without padding."""
        return self.tokens_per_step / self.step_s

    @property
    def speed(self) -> str:
        """Text for people: tokens/s, with a range for estimates."""
        if self.off_by == 1:
            return f"{self.tokens_per_s:,.0f} real tokens/s"
        low, high = self.tokens_per_s / self.off_by, self.tokens_per_s * self.off_by
        return f"{low:,.0f} to {high:,.0f} real tokens/s (estimate: {self.tokens_per_s:,.0f})"

    @property
    def total_s(self) -> float:
        """Seconds of the run, without data preparation and the compilation of the first step."""
        return self.steps * self.step_s + self.beside_steps_s

    @property
    def beside_steps_s(self) -> float:
        if not self.steps:
            return 0.0
        return self.reference_s + self.evaluations * self.evaluation_s + self.saving_s + self.export_s

    @property
    def saving_s(self) -> float:
        """Seconds for which training waits for saves, in the whole run."""
        return self.saves * self.save_s + self.stall_s

    @property
    def size(self) -> str:
        """Text for people, such as `8.03 B parameters`."""
        for unit, factor in (("B", 10**9), ("M", 10**6)):
            if self.parameters >= 0.9995 * factor:  # from here, three digits round up to 1
                return f"{short(self.parameters / factor)} {unit} parameters"
        return f"{self.parameters:,} parameters"

    @property
    def disk_words(self) -> str | None:
        """Text for people: the states on disk and their cost in a step; None if no states are on disk."""
        if not self.on_disk:
            return None
        shares = (("states", self.on_disk.states), ("gradient sums", self.on_disk.gradients))
        kinds = [
            f"{name} of {sum(math.prod(shape) * count for shape, count in counts) / self.parameters:.0%}"
            for name, counts in shares
            if counts
        ]
        parts = [f"{', '.join(kinds)} of the parameters"] if kinds else []
        parts += [f"{count_of(self.on_disk.layers, 'layer')} whole"] if self.on_disk.layers else []
        daily = self.scratch_written_per_step / self.step_s * 86400
        is_short = self.disk_s <= DISK_PART * self.step_s or self.disk_batch is None
        enough = "" if is_short else f"; {DISK_PART:.0%} with {self.disk_batch:,} sequences a step"
        return (
            f"{', '.join(parts)}: {self.scratch_bytes_per_node / 1e9:,.1f} GB a node,"
            f" {self.scratch_moved_per_step / 1e9:,.1f} GB read and written a step, which waits {short(self.disk_s)} s"
            f" for it ({self.disk_s / self.step_s:.0%}{enough}); {daily / 1e12:,.1f} TB written a day"
        )

    @property
    def copied_words(self) -> str | None:
        """Text for people about the layers that are copied to a GPU for each use; None if all layers are resident."""
        if not self.copied_layers:
            return None
        return (
            f"{count_of(self.copied_layers, 'layer')} cross PCIe for each use, because GPU memory is short:"
            " predicted, not yet measured on a GPU"
        )

    @property
    def concerns(self) -> list[str]:
        """Lines about settings that are rarely meant, for `plan`, `train`, `cluster render` and `cluster check`."""
        on_cpu, ec2 = self.device == "cpu", None if self.instance is None else instance(self.instance)
        gpu_concern = None if ec2 is None or on_cpu else ec2.gpu_concern
        cores, threads = 0 if ec2 is None else ec2.physical_cores, self.ranks_per_node * self.threads_per_rank
        rows = (
            (gpu_concern, str(gpu_concern)),
            (
                not self.disk_read_bytes and self.parameters > _LARGE_MODEL,
                f"training begins from random weights (model.config, {self.size}): for published weights set"
                " model.path",
            ),
            (
                self.device == "cuda" and self.ranks_per_node < self.gpus_per_node,
                f"the run uses {self.ranks_per_node} of {count_of(self.gpus_per_node, 'GPU')} of each node; all with"
                f" launch.ranks={self.gpus_per_node}, or cluster.ranks_per_node={self.gpus_per_node}",
            ),
            (
                on_cpu and 2 * threads <= cores,
                f"the run uses {threads} of {cores} cores of each node: leave launch.threads_per_rank out, or take more"
                " ranks (cluster.ranks_per_node)",
            ),
            (
                self.losses.idle_ranks >= _MUCH_IDLE,
                f"{self.losses.idle_ranks:.0%} of the ranks have no sequence in a step: take fewer nodes or ranks, or a"
                " larger train.global_batch_size",
            ),
            (
                self.steps and self.saving_s > max(_MUCH_SAVING_S, self.steps * self.step_s),
                f"saves take {duration(self.saving_s)}, longer than all steps: save less often (checkpoint.every), or"
                " on a faster disk or file system (cluster.storage)",
            ),
            (self.waiting_factor > _MUCH_WAITING, f"a step mostly waits: {self.bottleneck}"),
        )
        return [concern for is_present, concern in rows if is_present]

    @property
    def cost_usd(self) -> float | None:
        """On-demand price of the whole run with its fees; None if the price or the number of steps is unknown."""
        if self.usd_per_hour is None or not self.steps:
            return None
        return (self.usd_per_hour + self.fees_usd_per_hour) * self.total_s / 3600

    @property
    def usd_per_billion_tokens(self) -> float | None:
        """On-demand price of training on 1e9 tokens with the fees, without saves and evaluations; None: unknown."""
        if self.usd_per_hour is None:
            return None
        return (self.usd_per_hour + self.fees_usd_per_hour) / 3600 * 1e9 / self.tokens_per_s

    @property
    def allocator_cache_bytes(self) -> int:
        """Freed memory that the allocator of a rank may keep at the steady peak while layers stream from disk.

        The plan reserves allocator slack. Half of the slack is for this cache, the other half for holes between live
        tensors.
        """
        return self.phases[-1].private_bytes["allocator"] // 2

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `as_json` returned, also after a round trip through JSON text. Ignore the derived values."""
        return TypeAdapter(cls).validate_python(values)

    def as_record(self) -> dict[str, Any]:
        """Return `as_json` plus the peak of each phase: the form in `ledger.json` and in the events of a run."""
        return self.as_json() | {
            name: {phase.name: phase.per_rank(self.ranks_per_node) for phase in phases}
            for name, phases in (("peak_bytes", self.phases), ("host_peak_bytes", self.host_phases))
        }

    def as_json(self) -> dict[str, Any]:
        """Return all fields and derived values, under the names that `aliquot plan --json` prints."""
        derived = (
            "peak_bytes_per_rank",
            "limit_bytes",
            "host_peak_bytes_per_rank",
            "host_limit_bytes",
            "fits",
            "tokens_per_s",
            "speed",
            "total_s",
            "beside_steps_s",
            "saving_s",
            "disk_words",
            "cost_usd",
            "usd_per_billion_tokens",
            "concerns",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in derived}, "peak_phase": self.peak.name}
