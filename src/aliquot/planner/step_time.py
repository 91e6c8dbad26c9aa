"""Seconds of an optimizer step and of an evaluation: operations, traffic and disk at the rates of a rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from aliquot.distributed.topology import RankLayout
from aliquot.engines.host.host_memory import DiskUse
from aliquot.engines.rank_memory import RankMemory
from aliquot.engines.state_placement import Unsharded
from aliquot.optim.sizes import States
from aliquot.planner.micro_batch_cost import MicroBatchCost, Work
from aliquot.planner.rates import CORE_MEMORY_BYTES_PER_S, Rates
from aliquot.planner.traffic import Traffic

_TAIL = 0.1  # of the traffic between hosts: the first weights to come and the last sums to leave overlap with nothing
_SUM_PASSES = 5  # over gradients that hosts send and receive: their checksums, and one more sum
_STAGED_BYTES = 4 << 20  # of a gradient piece that engine host copies into the ring
_PATCH_BYTES_PER_S = 1.5e9  # weights encoded or decoded as a patch; 1.6 and 1.9 on Zen 4, 0.8 and 1.2 on Zen 3
_COPIED_BYTES_PER_S = 8e9  # between a GPU and memory that is not pinned, assumed
# Passes over the bytes of an update, because torch runs AdamW operation by operation; states other than fp32 are also
# decoded and encoded. Measured on two cores of Zen 4.
_UPDATE_PASSES: dict[States, float] = {"fp32": 1.25, "bf16": 7.5, "int8": 32.0}
# Calls of torch, about: for a weight of engine host (staged, announced, summed); for a group of engine fsdp (gathered
# twice, gradients reduced, hooks); for a parameter of DeepSpeed (gathered, into its bucket and out of it, hooks).
_CALLS_OF_WEIGHT, _CALLS_OF_GROUP, _CALLS_OF_DEEPSPEED = 20, 600, 160
# DeepSpeed 0.19.8 adds gradients to a bucket, copies the bucket and divides it. Its update casts gradients to fp32,
# takes their norm, scales them and casts weights, and torch's AdamW passes over weights and moments operation by
# operation: bytes read and written for each element that the rank owns.
_DEEPSPEED_REDUCED_PASSES, _DEEPSPEED_UPDATE_BYTES = 6, 24 + 80


@dataclass(frozen=True)
class StepTime:
    """Seconds of the slowest rank. A GPU computes while it sends and gathers; on CPU only engine host does, between
    hosts."""

    overlaps: bool
    matmul_s: float
    memory_s: float  # elementwise operations, gradients and their sums, the update
    local_s: float  # sockets of one host
    wire_s: float  # between hosts, not hidden behind computation
    disk_s: float  # not hidden behind computation

    @property
    def total_s(self) -> float:
        computing, sending = self.matmul_s + self.memory_s, self.local_s + self.wire_s
        return max(computing, sending) if self.overlaps else computing + sending + self.disk_s

    @property
    def bottleneck(self) -> str:
        """The largest part of the step, and its ratio to the matrix products: `network-bound 4.1x`."""
        network = self.wire_s + self.local_s
        hidden = self.overlaps and network <= self.matmul_s + self.memory_s
        if self.disk_s > max(network, self.matmul_s, self.memory_s):
            return f"disk-bound {self.disk_s / self.matmul_s:.1f}x"
        if network > max(self.matmul_s, self.memory_s) and not hidden:
            return f"network-bound {network / self.matmul_s:.1f}x"
        if self.memory_s > self.matmul_s:
            return f"memory-bound {self.memory_s / self.matmul_s:.1f}x"
        return "compute-bound"


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch on a rank: (matrix products, all other operations)."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    evaluation: tuple[float, float]  # without gradients

    @classmethod
    def from_cost(cls, cost: MicroBatchCost, rates: Rates) -> Self:
        return cls(*(_work_s(work, rates) for work in (cost.forward, cost.backward, cost.evaluation)))

    def scaled(self, fraction: float) -> Self:
        """Return the times of a micro-batch that is smaller by this factor."""
        forward, backward, evaluation = (
            (fraction * products, fraction * rest) for products, rest in (self.forward, self.backward, self.evaluation)
        )
        return type(self)(forward, backward, evaluation)

    @property
    def step_s(self) -> float:
        return sum(self.forward) + sum(self.backward)


@dataclass(frozen=True)
class OwnedShard:
    """The weights that a rank updates."""

    numel: int
    weights: int  # tensors that the shard has parts of
    states: States
    in_one_pass: bool  # compiled, or without a separate master copy


@dataclass(frozen=True)
class StepSetting:
    """The settings of a rank that determine the time of a step, apart from the number of micro-batches."""

    engine: str
    layout: RankLayout
    held: RankMemory
    owned: OwnedShard
    groups: int  # of weights that engine fsdp gathers together
    patched_bytes: int  # of weights whose changes go to other hosts as patches
    disk_bytes_per_s: float  # of a node, both directions together
    offloaded: Unsharded | None  # None, or the tensors that a GPU with offloaded states keeps whole within a step


def step_time(
    setting: StepSetting, micro_batch: MicroBatchTime, micro_batches: int, moved: Traffic, disk: DiskUse, rates: Rates
) -> StepTime:
    """Return the time of an optimizer step of `micro_batches` on each rank."""
    layout = setting.layout
    matmul_s = micro_batches * (micro_batch.forward[0] + micro_batch.backward[0])
    memory_s = micro_batches * (micro_batch.forward[1] + micro_batch.backward[1])
    local_s = _local_s(moved.local_bytes, layout, rates)
    if setting.engine != "host":
        memory_s += _collective_s(setting, moved, micro_batches, rates)
        wire_s = _wire_s(moved.wire_bytes, layout, rates)
        return StepTime(layout.device == "cuda", matmul_s, memory_s, local_s, wire_s, disk_s=0.0)
    # A gradient is written once into the ring. Its owner on this host, or the counterpart of an owner on another host,
    # reads it and adds it to a sum.
    owned, held = setting.owned, setting.held
    sum_itemsize = 4 if owned.states == "fp32" else 2
    memory_s += rates.memory_s("copy_", _STAGED_BYTES, 2 * moved.shared_bytes / layout.world_size)
    memory_s += rates.overhead_s(_CALLS_OF_WEIGHT * owned.weights * micro_batches)
    summed = layout.nodes * owned.numel * micro_batches
    memory_s += rates.stage_s(summed * 2 * (layout.ranks_per_node + sum_itemsize))
    update_bytes = 6 * held.own_gradients + 2 * held.moments
    passes = 1.0 if owned.in_one_pass else _UPDATE_PASSES[owned.states]
    update_s = rates.stage_s(passes * update_bytes + disk.update / layout.world_size)
    # Gradient sums go to the disk, and layers come from it, while other layers compute. An update is as fast as the
    # slower of disk and cores, and all but its beginning continues while the next forward pass computes.
    disk_rate = layout.nodes * setting.disk_bytes_per_s
    update_waits_s = max(0.0, disk.update / disk_rate - update_s)
    begin_s = update_waits_s * disk.update_first / max(1, disk.update)
    forward_s = 0.0 if layout.nodes > 1 else sum(micro_batch.forward)
    hiding_s = matmul_s + memory_s - min(forward_s, update_waits_s - begin_s)
    streaming_s = max(0.0, (disk.beside_read + disk.beside_written) / disk_rate - hiding_s)
    disk_s = streaming_s + max(begin_s, update_waits_s - forward_s)
    sent_weights = moved.wire_weights_bytes / layout.nodes
    sent_gradients = moved.wire_bytes / layout.nodes - sent_weights
    memory_s += update_s
    memory_s += rates.gloo_s((sent_weights + sent_gradients) / (layout.ranks_per_node * layout.threads_per_rank))
    memory_s += rates.stage_s(_SUM_PASSES * sent_gradients / layout.ranks_per_node)
    memory_s += setting.patched_bytes / layout.ranks_per_node / (_PATCH_BYTES_PER_S * rates.core_share)
    # Sums leave while the last backward pass computes; weights come while their owners update and the next forward pass
    # computes.
    gradients_s, weights_s = rates.wire_s(sent_gradients), rates.wire_s(sent_weights)
    wire_s = max(_TAIL * gradients_s, gradients_s - sum(micro_batch.backward))
    wire_s += max(_TAIL * weights_s, weights_s - update_s - sum(micro_batch.forward))
    return StepTime(layout.device == "cuda", matmul_s, memory_s, local_s, wire_s, disk_s)


def evaluation_time(
    setting: StepSetting, micro_batch: MicroBatchTime, micro_batches: float, moved: Traffic, rates: Rates
) -> float:
    """Return the seconds of an evaluation of `micro_batches` on each rank."""
    layout, batches = setting.layout, math.ceil(micro_batches)
    gatherings = min(1, batches) if moved.forward_once else batches
    wire, local = (gatherings * size for size in moved.forward)
    sending = _local_s(local, layout, rates) + _wire_s(wire, layout, rates)
    computing = micro_batches * sum(micro_batch.evaluation)
    if layout.device == "cuda":
        copied = 0 if setting.offloaded is None else batches * setting.held.weights
        return max(computing, sending) + copied / _COPIED_BYTES_PER_S
    if setting.engine == "host":
        return computing
    calls = _calls(setting) / 3  # a step gathers twice and reduces once
    gathering = rates.stage_s(_gathered_passes(setting) * moved.forward_gathered) + rates.overhead_s(calls)
    return computing + gatherings * gathering + sending


def _collective_s(setting: StepSetting, moved: Traffic, micro_batches: int, rates: Rates) -> float:
    """Seconds of cores, or of a GPU, for the copies around collectives and for the update."""
    held, layout = setting.held, setting.layout
    states = held.weights + held.moments + held.gradients
    if layout.device == "cuda":
        # Casts and copies into flat buffers and out of them; gradients to fp32.
        seconds = rates.stage_s(2 * held.gradients * micro_batches)
        if (whole := setting.offloaded) is None:
            return seconds + rates.stage_s(2 * states)
        # Weights come for each forward and each backward pass, gradients go: the GPU computes nothing meanwhile.
        gradients = held.own_gradients or held.gradients
        comes = held.weights * (1 if whole.weights else 2 * micro_batches)
        goes = gradients * (1 if whole.gradients else micro_batches)
        update = 2 * (held.weights + held.moments + gradients)
        return (
            seconds
            + (comes + goes) / _COPIED_BYTES_PER_S
            + update / (CORE_MEMORY_BYTES_PER_S * layout.threads_per_rank)
        )
    moved_bytes = _gathered_passes(setting) * moved.gathered_bytes
    if setting.engine == "fsdp":
        # A rank copies gradients as fp32 into a buffer, in pieces, passes them on, and adds the gradients of all ranks
        # to its shard. A single rank only copies.
        passes = 6.5 + (4 / layout.world_size if layout.world_size > 1 else 0)
        moved_bytes += passes * moved.reduced_bytes + 2 * states
    else:
        moved_bytes += _DEEPSPEED_REDUCED_PASSES * moved.reduced_bytes + _DEEPSPEED_UPDATE_BYTES * setting.owned.numel
    return rates.stage_s(moved_bytes) + rates.overhead_s(_calls(setting) * micro_batches)


def _calls(setting: StepSetting) -> int:
    if setting.engine == "fsdp":
        return _CALLS_OF_GROUP * setting.groups
    return _CALLS_OF_DEEPSPEED * setting.owned.weights


def _gathered_passes(setting: StepSetting) -> float:
    """Bytes read and written on CPU for each byte of weights that a collective makes whole on a rank."""
    if setting.engine == "deepspeed":
        return 2
    # A rank casts its shard and passes it on, copies all shards into a buffer, and copies the buffer to the weights. A
    # single rank casts and copies.
    ranks = setting.layout.world_size
    return 4 + 5 / ranks if ranks > 1 else 5


def _local_s(moved_bytes: float, layout: RankLayout, rates: Rates) -> float:
    """Seconds of bytes that all ranks together send through sockets of their hosts."""
    share = moved_bytes / layout.world_size
    return rates.local_s(share) + (rates.gloo_s(share) if layout.device == "cpu" else 0)


def _wire_s(moved_bytes: float, layout: RankLayout, rates: Rates) -> float:
    """Seconds of bytes that all ranks together send between hosts, while CPUs compute nothing."""
    on_wire = rates.wire_s(moved_bytes / layout.nodes)
    return max(on_wire, rates.gloo_s(moved_bytes / layout.world_size)) if layout.device == "cpu" else on_wire


def _work_s(work: Work, rates: Rates) -> tuple[float, float]:
    """Seconds of matrix products, and of all other operations."""
    products = rest = 0.0
    for key, amount in work.items():
        if key[0] == "matmul":
            products += amount * rates.matmul_s(*key[1:])
        elif key[0] == "memory":
            _, operation, tensor_bytes = key
            rest += rates.memory_s(operation, tensor_bytes, amount)
        else:
            rest += rates.overhead_s(amount)
    return products, rest
