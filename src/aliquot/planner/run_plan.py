"""Make the plan of one run with one engine: operations first, then memory, then time."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from aliquot.config.schema import RunConfig
from aliquot.core.intervals import times_due
from aliquot.data.workload import BatchSize, Workload, batch_size
from aliquot.distributed.topology import RankLayout
from aliquot.engines.fsdp.fsdp_memory import replicas
from aliquot.engines.host.host_memory import RING_BYTES, LayerCopies, decoding_bytes, disk_use
from aliquot.models.model_shape import padded_share
from aliquot.nn.product_shapes import logits_room
from aliquot.planner.checkpoint_cost import (
    Saving,
    checkpoint_bytes,
    count_saves,
    export_bytes,
    most_checkpoints,
    saves_overlap,
    snapshot_bytes,
)
from aliquot.planner.machine_profile import measured_rates
from aliquot.planner.memory_phases import helper_process_bytes
from aliquot.planner.memory_plan import MemoryPlan, MemoryPlanner
from aliquot.planner.micro_batch_cost import MicroBatchCost, Step, kernel_bytes, kernel_shapes
from aliquot.planner.plan import DISK_PART, Plan
from aliquot.planner.planned_machine import DISK_BYTES_PER_S, GIB, Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.rates import Rates, estimated
from aliquot.planner.scaling import losses
from aliquot.planner.step_time import MicroBatchTime, StepSetting, StepTime, evaluation_time, step_time
from aliquot.planner.traffic import traffic
from aliquot.tensor_io.parts import MEMORY_BYTES

_MOST_MICRO_BATCHES = 4096  # per rank, in the search for a batch that hides the disk
_NCCL_SHM_BYTES = 64 << 20  # per rank: NCCL's buffers if the GPUs of a host have no direct link


@dataclass
class ModelOnMachine:
    """One model on one kind of machine. Caches the rates of ranks and the times of micro-batches."""

    model: PlannedModel
    machine: Machine

    def __post_init__(self) -> None:
        self.shape = self.model.shape
        self._rates: dict[tuple[str, int, int, bool], Rates] = {}
        self._times: dict[tuple[int, int], MicroBatchTime] = {}

    def rates(self, layout: RankLayout) -> Rates:
        """Return measured rates of a rank, or estimates if this machine was not measured."""
        key = (layout.device, layout.ranks_per_node, layout.threads_per_rank, layout.world_size > 1)
        if key not in self._rates:
            self._rates[key] = measured_rates(self.machine, layout) or estimated(self.machine, layout)
        return self._rates[key]

    def micro_batch_time(self, cost: MicroBatchCost, rates: Rates) -> MicroBatchTime:
        key = (id(cost), id(rates))  # ids stay unique: the model keeps costs, `self` keeps rates
        if key not in self._times:
            self._times[key] = MicroBatchTime.from_cost(cost, rates)
        return self._times[key]


class RunPlan:
    """Makes the plan of one run with one engine."""

    def __init__(
        self,
        planned: ModelOnMachine,
        config: RunConfig,
        engine: str,
        layout: RankLayout,
        workload: Workload,
        approximate: bool,
    ) -> None:
        self.machine, self.shape = planned.machine, planned.shape
        self.config, self.engine, self.layout, self.workload = config, engine, layout, workload
        self.size = batch_size(config.train, layout.world_size)
        self.micro_batches = self.size.micro_batches(layout.world_size, config.data.source_count)
        self.steps = _steps(config, workload, self.size.total)
        self.cost = planned.model.cost_of(
            self._step(), workload, self.size.micro, approximate, layout.world_size, self._micro_batches_between_waits()
        )
        self.rates = planned.rates(layout)
        self.whole_micro_batch = planned.micro_batch_time(self.cost, self.rates)
        # Some micro-batches are smaller with several sources, or if the batch is no multiple of the world size.
        sequences = self.size.sequences(layout.world_size, config.data.source_count)
        self.micro_batch = self.whole_micro_batch.scaled(sequences / (self.size.micro * self.micro_batches))
        storage = self.machine.storage_bytes_per_s(config, layout.nodes)
        self.saving = Saving(
            numel=self.shape.learned_numel,
            checkpoint_bytes=checkpoint_bytes(config, self.shape),
            storage_bytes_per_s=storage,
            storage_is_measured=storage == self.machine.written_bytes_per_s,
        )

    def make(self) -> Plan:
        config, layout, machine, size, workload = self.config, self.layout, self.machine, self.size, self.workload
        on_gpu = layout.device == "cuda"
        has_nccl = on_gpu and self.engine != "host"
        gib = config.shard.memory
        host_limit = machine.memory_bytes if gib is None else min(machine.memory_bytes, int(gib * GIB))
        limit = layout.ranks_per_node * (machine.gpu_memory_bytes or 0) if on_gpu else host_limit
        helpers = 0 if on_gpu else helper_process_bytes(config, layout.world_size)
        freed = 0 if on_gpu else self.cost.saved_bytes
        snapshot = snapshot_bytes(config, layout, self.steps, self.saving, self.micro_batch, self.micro_batches, freed)
        # Write buffers. With engine fsdp on GPUs, the buffers that have read the weights serve again.
        pieces = MEMORY_BYTES if saves_overlap(config, self.steps) and not has_nccl else 0
        memory = MemoryPlanner(
            config=config,
            engine=self.engine,
            shape=self.shape,
            layout=layout,
            cost=self.cost,
            index_bytes=workload.index_bytes,
            snapshot_bytes=snapshot + pieces,
            kernel_bytes=kernel_bytes(config, self.cost, size, workload, machine.isa),
            limit_bytes_per_node=limit - helpers,
            host_limit_bytes_per_node=host_limit,
            keeps_holes=machine.allocator == "glibc",
        ).plan(self.micro_batches)

        setting = self._setting(memory)
        moved = traffic(config, self.engine, self.shape, layout, self.micro_batches, memory.unsharded)
        disk = disk_use(config, self.shape, layout, memory.on_disk, self.micro_batches)
        step = self._step_time(setting, memory, self.micro_batches)
        saves = count_saves(
            config, self.steps or 0, self.saving, layout.world_size, step.total_s,
            until_update_s=self.micro_batches * self.micro_batch.step_s,
        )  # fmt: skip
        evaluations = config.train.eval_on_start + times_due(config.train.eval_steps, self.steps or 0)
        evaluated = BatchSize(workload.eval_sequences or 0, size.micro).sequences(layout.world_size) / size.micro
        with_reference = (workload.sequences or 0) + (workload.eval_sequences or 0)
        passes = {"dpo": 1, "kto": 2}.get(config.train.objective, 0)  # kto: with mismatched answers
        compared = passes * BatchSize(with_reference, size.micro).sequences(layout.world_size) / size.micro
        mismatched = size.sequences(layout.world_size) / size.micro if config.train.objective == "kto" else 0
        divergence_s = evaluation_time(setting, self.whole_micro_batch, mismatched, moved, self.rates)
        exported, instance = export_bytes(config, self.shape), machine.instance
        hourly = None if instance is None else instance.usd_per_hour
        stored = self.shape.numel - (0 if config.adapter is None else self.shape.learned_numel)
        loads = layout.nodes if self.engine == "host" else 1  # of the compressed weights
        read_bytes = (stored - self.shape.compressed_numel) * self.shape.dtype_bytes
        read_bytes += loads * self.shape.compressed_file_bytes
        filled = -(-size.total // size.micro)  # micro-batches of a step, of all ranks
        return Plan(
            model=self.shape.name,
            parameters=self.shape.numel,
            trained_parameters=self.shape.learned_numel,
            base=config.base,
            engine=self.engine,
            precision=config.train.chosen_precision,
            compile="layers" if config.train.compile == "layers" else "none",
            fp8=config.train.fp8,
            micro_batch=size.micro,
            gradient_checkpointing=config.train.chosen_checkpointing,
            device=layout.device,
            nodes=layout.nodes,
            ranks_per_node=layout.ranks_per_node,
            threads_per_rank=layout.threads_per_rank,
            instance=None if instance is None else instance.name,
            phases=memory.phases,
            host_phases=memory.host_phases,
            host_limit_bytes_per_node=host_limit,
            shm_bytes_per_node=_NCCL_SHM_BYTES * layout.ranks_per_node if has_nccl else 0,
            limit_bytes_per_node=limit,
            wire_bytes_per_step=moved.wire_bytes,
            local_bytes_per_step=moved.local_bytes,
            disk_read_bytes=read_bytes if config.model.path is not None else 0,
            checkpoint_bytes=self.saving.checkpoint_bytes,
            steps=self.steps or 0,
            tokens_per_step=size.total * workload.tokens,
            step_s=step.total_s + divergence_s,
            bottleneck=step.bottleneck,
            waiting_factor=step.waiting_factor,
            evaluations=evaluations if evaluated else 0,
            uncounted_evaluations=evaluations if config.data.has_evaluation and not evaluated else 0,
            evaluation_s=evaluation_time(setting, self.whole_micro_batch, evaluated, moved, self.rates),
            reference_s=evaluation_time(setting, self.whole_micro_batch, compared, moved, self.rates),
            save_steps=config.checkpoint.save_steps,
            checkpoints=most_checkpoints(config, self.steps or 0),
            saves=saves.blocking,
            saves_beside=saves.overlapped,
            stall_s=saves.stall_s,
            save_s=self.saving.save_s,
            export_s=exported / self.saving.storage_bytes_per_s,
            export_bytes=exported,
            storage_bytes_per_s=self.saving.storage_bytes_per_s,
            storage_measured=self.saving.storage_is_measured,
            network_bytes_per_s=self.rates.sent_bytes_per_s(layout),
            gpus_per_node=machine.gpus,
            beside_bytes=helpers,
            on_disk=memory.on_disk,
            copied_layers=memory.copied_layers,
            unsharded=memory.unsharded,
            replicate="nodes" if self.engine == "fsdp" and replicas(config, layout) > 1 else "none",
            scratch_bytes_per_node=disk.size // layout.nodes,
            scratch_moved_per_step=disk.update + disk.beside_read + disk.beside_written,
            scratch_written_per_step=disk.written,
            disk_s=step.disk_s,
            disk_batch=self._batch_that_hides_the_disk(setting, memory) if disk.size else None,
            rates=self.rates.source,
            off_by=self.rates.off_by,
            kernel_shapes=kernel_shapes(config, self.shape, self.cost, size, machine.isa),
            usd_per_hour=None if hourly is None else hourly * layout.nodes,
            losses=losses(
                step,
                setting,
                self.micro_batches,
                moved.wire_bytes,
                self.saving.save_s,
                idle_ranks=1 - filled / (-(-filled // layout.world_size) * layout.world_size),
            ),
            fees_usd_per_hour=0.0 if hourly is None or config.cluster is None else config.cluster.fees_usd_per_hour,
        )

    def _step(self) -> Step:
        config, on_gpu = self.config, self.layout.device == "cuda"
        return Step(
            precision=config.train.chosen_precision,
            checkpointing=config.train.chosen_checkpointing,
            device=self.layout.device,
            looks_up=self.engine == "host",
            head_gradient=self.engine != "host",
            compiled=config.train.compile == "layers",
            runs_head_twice=config.train.objective != "sft",
            logits_bytes=logits_room(self.machine.gpu_memory_bytes if on_gpu else None),
            copies_transposed=not on_gpu and config.train.chosen_precision == "bf16" and "amx_bf16" in self.machine.isa,
        )

    def _micro_batches_between_waits(self) -> int:
        """Return the micro-batches that a rank computes before it waits for other ranks.

        A rank that all-gathers weights waits in every layer. With engine host, a rank waits only while its ring buffer
        is full of gradients that other ranks have not read yet.
        """
        if self.engine != "host":
            return 1
        staged = traffic(self.config, self.engine, self.shape, self.layout, 1).shared_bytes // self.layout.world_size
        return min(self.micro_batches, 1 + RING_BYTES // max(1, staged))

    def _setting(self, memory: MemoryPlan) -> StepSetting:
        config, layout, alike = self.config, self.layout, self.shape.alike
        states = config.train.optimizer_states
        in_bf16 = config.train.chosen_precision == "bf16"
        return StepSetting(
            engine=self.engine,
            layout=layout,
            held=memory.held,
            states=states,
            updates_in_one_pass=states == "fp32" and (not in_bf16 or config.train.compile == "layers"),
            numel=sum(padded_share(weight, layout.world_size) * count for weight, count in alike.items()),
            weights=sum(alike.values()),
            groups=len(self.shape.padded_groups(layout.world_size)),
            weights_bytes=config.train.compute_itemsize * self.shape.learned_numel,
            patched_bytes=2 * self.shape.learned_numel if layout.nodes > 1 and in_bf16 else 0,
            disk_bytes_per_s=self.machine.disk_bytes_per_s or DISK_BYTES_PER_S,
            offloads=config.shard.offload == "cpu",
            unsharded=memory.unsharded,
            replicas=replicas(config, layout) if self.engine == "fsdp" else 1,
            decoded_bytes=decoding_bytes(self.engine, self.shape, layout),
            copies=LayerCopies.planned(config, self.shape, memory.copied_layers),
        )

    def _step_time(self, setting: StepSetting, memory: MemoryPlan, micro_batches: int) -> StepTime:
        disk = disk_use(self.config, self.shape, self.layout, memory.on_disk, micro_batches)
        moved = traffic(self.config, self.engine, self.shape, self.layout, micro_batches, memory.unsharded)
        micro_batch = self.micro_batch if micro_batches == self.micro_batches else self.whole_micro_batch
        return step_time(setting, micro_batch, micro_batches, moved, disk, self.rates)

    def _batch_that_hides_the_disk(self, setting: StepSetting, memory: MemoryPlan) -> int | None:
        """Return the smallest global batch that waits at most DISK_PART of a step for disks, or None."""

        def hardly_waits(count: int) -> bool:
            step = self._step_time(setting, memory, count)
            return step.disk_s <= DISK_PART * step.total_s

        counts = range(1, _MOST_MICRO_BATCHES + 1)
        index = bisect_left(counts, True, key=hardly_waits)
        return counts[index] * self.size.micro * self.layout.world_size if index < len(counts) else None


def _steps(config: RunConfig, workload: Workload, total: int) -> int | None:
    """Return the optimizer steps of the run; None if max_steps is not set and the size of the data is unknown."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    if workload.sequences is None:
        return None
    return -(-math.ceil(config.train.num_train_epochs * workload.sequences) // total)
