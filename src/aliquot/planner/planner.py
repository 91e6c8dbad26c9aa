"""The plan of a run: from its configuration alone, for this machine or any other, without one byte of weights."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from aliquot.config.schema import RunConfig
from aliquot.core.intervals import times_due
from aliquot.data.batch_size import BatchSize, batch_size
from aliquot.data.workload import Workload
from aliquot.distributed.topology import RankLayout
from aliquot.engines.deepspeed.deepspeed_memory import building, deepspeed_memory
from aliquot.engines.engine_choice import chosen_engine
from aliquot.engines.fsdp.fsdp_memory import fsdp_memory
from aliquot.engines.host.host_memory import RING_BYTES, disk_use, host_memory
from aliquot.engines.rank_memory import RankMemory
from aliquot.engines.state_placement import SHARDED, OnDisk, Unsharded
from aliquot.models.model_shape import ModelShape, padded_share
from aliquot.nn.loss.logits_room import logits_room
from aliquot.planner import fit
from aliquot.planner.calibrate import make_known
from aliquot.planner.checkpoint_cost import checkpoint_bytes, saves_beside, saves_of, snapshot_bytes
from aliquot.planner.disk_placement import MARGIN, most_unsharded, spilled
from aliquot.planner.engine_memory import beside_bytes, beside_on_cpu, beside_on_gpu, evaluates, host_phases, phases
from aliquot.planner.micro_batch_cost import MicroBatchCost, Step, kernel_bytes, kernel_shapes
from aliquot.planner.plan import DISK_PART, PhaseMemory, Plan
from aliquot.planner.planned_machine import GIB, Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.profiles import rates_of
from aliquot.planner.rates import Rates, estimated
from aliquot.planner.timing import MicroBatchTime, Owned, StepTime, evaluation_time, step_time
from aliquot.planner.traffic import traffic
from aliquot.tensor_io.piece_size import MEMORY_BYTES

_MOST_MICRO_BATCHES = 4096  # of a rank, to find a step of which that is true
DISK_BYTES_PER_S = 0.5e9  # a node, assumed: a volume or file system of the cloud; local NVMe is faster
_NCCL_SHM_BYTES = 64 << 20  # a rank; NCCL's own buffers where GPUs of a host have no direct link


def plan(
    config: RunConfig,
    machine: Machine | None = None,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    workload: Workload | None = None,
) -> Plan:
    """What `config` needs and how long it takes on `nodes` machines like `machine`, by default this one.

    Raises UserError as training would.
    """
    machine = machine or Machine.this()
    layout = machine.layout(config, nodes, ranks_per_node)
    make_known(machine, layout)
    return Planner(PlannedModel(config), machine).plan(config, layout, workload or Workload.assumed(config))


@dataclass
class Planner:
    """Plans of one model on one kind of machine; how long a micro-batch takes is worked out once for each way to run
    it."""

    model: PlannedModel
    machine: Machine

    def __post_init__(self) -> None:
        self.shape = self.model.shape
        self._rates: dict[tuple[str, int, int], Rates] = {}
        self._times: dict[tuple[int, int], MicroBatchTime] = {}

    def plan(self, config: RunConfig, layout: RankLayout, workload: Workload, approximate: bool = False) -> Plan:
        """`approximate`: micro-batches of more than two sequences are extrapolated, for many plans in short time.

        Where `shard.engine: auto` means host, and that does not fit, it is fsdp if that does: host keeps a copy of the
        weights on each node and, on several, its sums for the others.
        """
        engine = self.engine(config, layout)
        found = self._plan_with(engine, config, layout, workload, approximate)
        of_auto = config.shard.engine == "auto" and engine == "host"
        # fsdp has shared memory on one node alone, exact states, and no disk.
        shares, frugal = config.shard.collectives == "shared_memory", config.train.optimizer_states != "fp32"
        only_host = shares or frugal or config.shard.offload == "disk"
        if not of_auto or only_host or not fit.problems(found, self.machine):
            return found
        other = self._plan_with("fsdp", config, layout, workload, approximate)
        return found if fit.problems(other, self.machine) else other

    def _plan_with(
        self, engine: str, config: RunConfig, layout: RankLayout, workload: Workload, approximate: bool
    ) -> Plan:
        size = batch_size(config.train, layout.world_size)
        micro_batches = size.micro_batches(layout.world_size, config.data.source_count)
        step = _step(config, engine, layout, self.machine)
        between = self._between(config, engine, layout, micro_batches)
        cost = self.model.cost_of(step, workload, size.micro, approximate, layout.world_size, between)
        rates = self.rates(layout)
        whole_one = self._time(cost, rates)
        # Of several sources, or of a batch that they do not divide, some micro-batches are smaller.
        part = size.sequences(layout.world_size, config.data.source_count) / (size.micro * micro_batches)
        each = whole_one.of_part(part)
        steps = _steps(config, workload, size.total)
        evaluations = config.train.eval_on_start + times_due(config.train.eval_steps, steps or 0)
        told = building(config, self.shape, layout) if engine == "deepspeed" else []
        limit = self._limit(config, layout)
        beside = beside_bytes(config, layout.world_size) if layout.device == "cpu" else 0

        on_gpu, offloaded = layout.device == "cuda", config.shard.offload == "cpu"
        saved, disks = checkpoint_bytes(config, self.shape), self._storage_rate(config, layout.nodes)
        kernels = kernel_bytes(config, cost, size, workload, self.machine.isa)
        learned, freed = self.shape.learned_numel, 0 if on_gpu else cost.saved_bytes
        measured = disks == self.machine.written_bytes_per_s
        copies = snapshot_bytes(config, layout, steps, learned, saved, disks, each, micro_batches, freed, measured)
        pieces = MEMORY_BYTES if saves_beside(config, steps) else 0  # on their way to the disk

        def phases_with(on_disk: OnDisk, kept: Unsharded = SHARDED) -> tuple[RankMemory, tuple[PhaseMemory, ...]]:
            held = self._held(config, engine, layout, cost, on_disk, kept)
            if not on_gpu:
                beside = beside_on_cpu(held, workload.index_bytes, copies + pieces, kernels, step.compiled)
                return held, phases(config, held, cost, beside, told)
            # Sums of whole gradients stay where they are made until they are reduced.
            sums = held.gradients if kept.gradients else 0
            left = replace(held, weights=0, gradients=sums, moments=0, update=0) if offloaded else held
            return held, phases(config, left, cost, beside_on_gpu(layout.world_size), [])

        def too_much(on_disk: OnDisk, kept: Unsharded = SHARDED) -> float:
            most = max(phase.per_rank(layout.ranks_per_node) for phase in phases_with(on_disk, kept)[1])
            return most - (1 - MARGIN) * (limit - beside) / layout.ranks_per_node

        goes_to_disk = config.shard.offload == "disk" and engine == "host"
        streams = layout.nodes == 1 and self.shape.packs
        on_disk = spilled(self.shape, layout, streams, too_much) if goes_to_disk else OnDisk()
        kept = SHARDED
        if on_gpu and engine == "fsdp" and self.shape.packs:
            kept = most_unsharded(micro_batches, lambda each: too_much(OnDisk(), each) <= 0)
        held, found = phases_with(on_disk, kept)
        moved = traffic(config, engine, self.shape, layout, micro_batches, kept)
        owned, groups = _owned(config, self.shape, layout), len(self.shape.padded_groups(layout.world_size))
        disk = disk_use(config, self.shape, layout, on_disk, micro_batches)
        disk_rate = self.machine.disk_bytes_per_s or DISK_BYTES_PER_S
        patched = 2 * self.shape.learned_numel if layout.nodes > 1 and config.train.precision == "bf16" else 0

        def time_of(count: int) -> StepTime:
            used = disk_use(config, self.shape, layout, on_disk, count)
            passed = moved if count == micro_batches else traffic(config, engine, self.shape, layout, count, kept)
            whole = kept if offloaded else None
            work = (rates, owned, patched, used, disk_rate, whole, groups)
            time = each if count == micro_batches else whole_one
            return step_time(engine, time, held, passed, layout, count, *work)

        def hardly_waits(count: int) -> bool:
            with_count = time_of(count)
            return with_count.disk_s <= DISK_PART * with_count.total_s

        took = time_of(micro_batches)
        enough = _fewest_with(hardly_waits) if disk.size else None
        of_evaluation = BatchSize(workload.eval_sequences or 0, size.micro).sequences(layout.world_size) / size.micro
        copied = held.weights if on_gpu and offloaded else 0
        until_update_s = micro_batches * (sum(each.forward) + sum(each.backward))
        saves = saves_of(config, steps or 0, saved, disks, layout.world_size, took.total_s, until_update_s)
        hourly = self.machine.instance.usd_per_hour if self.machine.instance is not None else None
        return Plan(
            model=self.shape.name,
            parameters=self.shape.numel,
            engine=engine,
            precision=config.train.precision,
            device=layout.device,
            nodes=layout.nodes,
            ranks_per_node=layout.ranks_per_node,
            threads_per_rank=layout.threads_per_rank,
            instance=self.machine.instance.name if self.machine.instance is not None else None,
            phases=found,
            host_phases=host_phases(held, offloaded, workload.index_bytes, copies) if on_gpu else (),
            host_limit_bytes_per_node=self._wanted(config),
            shm_bytes_per_node=_NCCL_SHM_BYTES * layout.ranks_per_node if layout.device == "cuda" else 0,
            limit_bytes_per_node=limit,
            wire_bytes_per_step=moved.wire_bytes,
            local_bytes_per_step=moved.local_bytes,
            disk_read_bytes=moved.disk_read_bytes,
            checkpoint_bytes=saved,
            steps=steps or 0,
            tokens_per_step=size.total * workload.tokens,
            step_s=took.total_s,
            bottleneck=took.bottleneck,
            evaluations=evaluations if of_evaluation else 0,
            uncounted_evaluations=evaluations if evaluates(config) and not of_evaluation else 0,
            evaluation_s=evaluation_time(engine, whole_one, moved, layout, of_evaluation, rates, copied, owned, groups),
            saves=saves.waited,
            saves_beside=saves.beside,
            stall_s=saves.stall_s,
            save_s=saved / disks,
            export_s=moved.export_bytes / disks,
            export_bytes=moved.export_bytes,
            storage_bytes_per_s=disks,
            storage_measured=measured,
            beside_bytes=beside,
            on_disk=on_disk,
            unsharded=kept,
            scratch_bytes_per_node=disk.size // layout.nodes,
            scratch_moved_per_step=disk.update + disk.beside_read + disk.beside_written,
            scratch_written_per_step=disk.written,
            disk_s=took.disk_s,
            disk_batch=None if enough is None else enough * size.micro * layout.world_size,
            rates=rates.source,
            off_by=rates.off_by,
            kernel_shapes=kernel_shapes(config, self.shape, cost, size, self.machine.isa),
            usd_per_hour=None if hourly is None else hourly * layout.nodes,
        )

    def plan_on_fewest_nodes(self, config: RunConfig, layout: RankLayout, workload: Workload) -> Plan | None:
        """Plan the run on the fewest nodes that may remain of an elastic run, where each node holds most.

        None if the number of nodes is fixed, or if `layout` has no more than the fewest.
        """
        fewest = config.launch.fewest_nodes
        if not config.launch.is_elastic or fewest >= layout.nodes:
            return None
        return self.plan(config, replace(layout, nodes=fewest), workload)

    def engine(self, config: RunConfig, layout: RankLayout) -> str:
        """That the config means, whether or not it fits. Raises UserError for settings that it cannot follow."""
        return chosen_engine(config, layout.device, self.shape.numel, self.machine.memory_bytes)

    def rates(self, layout: RankLayout) -> Rates:
        key = (layout.device, layout.ranks_per_node, layout.threads_per_rank)
        if key not in self._rates:
            measured = rates_of(self.machine, layout)
            self._rates[key] = measured if measured is not None else estimated(self.machine, layout)
        return self._rates[key]

    def _time(self, cost: MicroBatchCost, rates: Rates) -> MicroBatchTime:
        key = (id(cost), id(rates))  # both are kept, here and by the model
        if key not in self._times:
            self._times[key] = MicroBatchTime.of(cost, rates)
        return self._times[key]

    def _between(self, config: RunConfig, engine: str, layout: RankLayout, micro_batches: int) -> int:
        """Micro-batches that a rank computes before it waits for the others. Who gathers waits in every layer; engine
        host only where a ring is full of gradients that others have not taken yet."""
        if engine != "host":
            return 1
        staged = traffic(config, engine, self.shape, layout, 1).shared_bytes // layout.world_size
        return min(micro_batches, 1 + RING_BYTES // max(1, staged))

    def _limit(self, config: RunConfig, layout: RankLayout) -> int:
        """Bytes that all ranks of a node may have together."""
        return self.machine.memory_for(layout) if layout.device == "cuda" else self._wanted(config)

    def _storage_rate(self, config: RunConfig, nodes: int) -> float:
        """Bytes a second that all nodes together write of a checkpoint."""
        if nodes == 1 and self.machine.written_bytes_per_s is not None:
            return self.machine.written_bytes_per_s
        assumed = DISK_BYTES_PER_S * nodes
        if config.cluster is None or self.machine.instance is None:
            return assumed
        known = config.cluster.storage.written_bytes_per_s
        return assumed if known is None else min(assumed, known)

    def _wanted(self, config: RunConfig) -> int:
        """Bytes of the machine's memory."""
        there, wanted = self.machine.memory_bytes, config.shard.memory
        return there if wanted is None else min(there, int(wanted * GIB))

    def _held(
        self, config: RunConfig, engine: str, layout: RankLayout, cost: MicroBatchCost, on_disk: OnDisk, kept: Unsharded
    ) -> RankMemory:
        if engine == "host":
            return host_memory(config, self.shape, layout, on_disk)
        if engine == "deepspeed":
            return deepspeed_memory(config, self.shape, layout)
        return fsdp_memory(config, self.shape, layout, cost.backward_bytes, cost.layer_bytes, kept)


def _step(config: RunConfig, engine: str, layout: RankLayout, machine: Machine) -> Step:
    return Step(
        precision=config.train.precision,
        checkpointing=config.train.gradient_checkpointing,
        device=layout.device,
        looks_up=engine == "host",
        head_gradient=engine != "host",
        compiled=config.train.compile == "layers",
        logits_bytes=logits_room(machine.gpu_memory_bytes if layout.device == "cuda" else None),
        copies_transposed=layout.device == "cpu" and config.train.precision == "bf16" and "amx_bf16" in machine.isa,
    )


def _owned(config: RunConfig, shape: ModelShape, layout: RankLayout) -> Owned:
    states = config.train.optimizer_states
    one_pass = config.train.precision == "fp32" or config.train.compile == "layers"
    numel = sum(padded_share(weight, layout.world_size) * count for weight, count in shape.alike.items())
    return Owned(numel, sum(shape.alike.values()), states, 4 if states == "fp32" else 2, states == "fp32" and one_pass)


def _fewest_with(suffices: Callable[[int], bool]) -> int | None:
    """Micro-batches of a rank and step; None: not even _MOST_MICRO_BATCHES do."""
    counts = range(1, _MOST_MICRO_BATCHES + 1)
    found = bisect_left(counts, True, key=suffices)
    return counts[found] if found < len(counts) else None


def _steps(config: RunConfig, workload: Workload, total: int) -> int | None:
    """Optimizer steps of the run; None where neither max_steps nor the size of the data tells."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    if workload.sequences is None:
        return None
    return -(-math.ceil(config.train.num_train_epochs * workload.sequences) // total)
