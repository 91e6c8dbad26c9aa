"""Estimate the seconds of an optimizer step and of an evaluation, from operations, memory, calls, traffic and disk.

The time of each kind of work is its bytes or operations divided by the rate of a rank. On CPU these times add up. Only
engine host overlaps traffic between hosts and disk access with computation. A GPU computes while it sends, and with
engine host while the CPU sums gradients. With engine fsdp, traffic that is sent once per step between hosts overlaps
with one forward or one backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import RankMemory, Unsharded
from aliquot.engines.host.host_memory import DiskUse, LayerCopies
from aliquot.optim.sizes import States
from aliquot.planner.micro_batch_cost import MicroBatchCost, Work
from aliquot.planner.rates import CORE_MEMORY_BYTES_PER_S, Rates
from aliquot.planner.traffic import Traffic

_TAIL = 0.1  # fraction of traffic between hosts that overlaps with nothing: the first weights, the last sums
_SUM_PASSES = 5  # reads and writes of gradients that hosts exchange: checksums, and one more sum
_PATCH_BYTES_PER_S = 1.5e9  # encoded or decoded as patches of weights; 1.6 and 1.9 on Zen 4, 0.8 and 1.2 on Zen 3
_COPIED_BYTES_PER_S = 8e9  # between a GPU and memory that is not pinned, assumed
# How often engine host passes over the bytes of an update. torch runs AdamW operation by operation, and states other
# than fp32 are also decoded and encoded. Measured on two cores of Zen 4.
_UPDATE_PASSES: dict[States, float] = {"fp32": 1.25, "bf16": 7.5, "int8": 32.0}
# Bytes that a rank on CPU reads and writes per byte of gathered weights, and per byte of reduced gradients: casts,
# sums, and copies into and out of the buffers of collectives.
_COLLECTIVE_PASSES = {"fsdp": (5.0, 7.5), "deepspeed": (2.0, 6.0)}
# Bytes that a rank reads and writes per element of its shard in an update of DeepSpeed 0.19.8. DeepSpeed casts
# gradients to fp32, takes their norm, scales them and casts weights. torch's AdamW runs operation by operation.
_DEEPSPEED_UPDATE_BYTES = 24 + 80
# Approximate torch calls per micro-batch: for a weight in engine host (write and publish its gradient, sum gradients),
# for a group of weights in engine fsdp (two all-gathers, a reduce-scatter, hooks), for a parameter in DeepSpeed
# (all-gather, copies into and out of its bucket, hooks).
_CALLS_OF_WEIGHT, _CALLS_OF_GROUP, _CALLS_OF_DEEPSPEED = 20, 600, 160


@dataclass(frozen=True)
class StepTime:
    """The seconds of an optimizer step on the slowest rank, by kind of work."""

    overlaps: bool  # a GPU computes while it sends
    matmul_s: float
    memory_s: float  # elementwise operations, gradients and their sums, the update, calls
    local_s: float  # traffic within a host, through sockets or between GPUs
    wire_s: float  # traffic between hosts that does not overlap with computation
    disk_s: float  # disk access that does not overlap with computation
    exposed_s: float = 0.0  # the part of `wire_s` during which even a GPU does not compute

    @property
    def total_s(self) -> float:
        return self.total_with(0.0)

    def total_with(self, latency_s: float) -> float:
        """Return the time of a step that sends for `latency_s` longer."""
        computing, sending = self.matmul_s + self.memory_s, self.local_s + self.wire_s + latency_s
        if self.overlaps:
            return max(computing, sending - self.exposed_s) + self.exposed_s
        return computing + sending + self.disk_s

    @property
    def bottleneck(self) -> str:
        """The largest part of the step: `network-bound (4.1x the time of matrix products)`."""
        name, factor = self._largest_part
        if name == "compute":
            return "compute-bound"
        resource = "memory-bandwidth" if name == "memory" else name
        return f"{resource}-bound ({factor:.1f}x the time of matrix products)"

    @property
    def waiting_factor(self) -> float:
        """The wait for network or disk, divided by the time of the matrix products, if no other part is larger."""
        name, factor = self._largest_part
        return factor if name in ("network", "disk") else 1.0

    @property
    def _largest_part(self) -> tuple[str, float]:
        network = self.wire_s + self.local_s
        if self.overlaps and network - self.exposed_s <= self.matmul_s + self.memory_s:
            network = self.exposed_s  # the rest overlaps completely with computation
        parts = {"compute": self.matmul_s, "memory": self.memory_s, "network": network, "disk": self.disk_s}
        name = max(parts, key=lambda part: parts[part])
        return name, parts[name] / self.matmul_s


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
        """Return the times of a micro-batch with this fraction of the sequences."""
        passes = (self.forward, self.backward, self.evaluation)
        return type(self)(*((fraction * products, fraction * rest) for products, rest in passes))

    @property
    def step_s(self) -> float:
        return sum(self.forward) + sum(self.backward)


@dataclass(frozen=True)
class StepSetting:
    """The settings of a rank that determine the time of a step, apart from the number of micro-batches."""

    engine: str
    layout: RankLayout
    held: RankMemory
    states: States
    updates_in_one_pass: bool  # compiled, or without a separate master copy
    numel: int  # elements that the rank updates
    weights: int  # number of weight tensors of the model
    groups: int  # number of weight groups that engine fsdp gathers one by one
    weights_bytes: int  # of weights that an update changes, in the compute dtype
    patched_bytes: int  # of weights whose changes are sent to other hosts as patches
    disk_bytes_per_s: float  # per node, reads and writes together
    offloads: bool  # a GPU's states are in host memory
    unsharded: Unsharded  # tensors that engine fsdp keeps unsharded on a GPU within a step
    replicas: int = 1  # copies of all states, with engine fsdp
    copies: LayerCopies = field(default_factory=LayerCopies)
    decoded_bytes: float = 0.0  # memory traffic of a rank that takes as long as to decode the base once


def step_time(
    setting: StepSetting, micro_batch: MicroBatchTime, micro_batches: int, moved: Traffic, disk: DiskUse, rates: Rates
) -> StepTime:
    """Return the time of an optimizer step, with `micro_batches` on each rank."""
    layout = setting.layout
    matmul_s = micro_batches * (micro_batch.forward[0] + micro_batch.backward[0])
    memory_s = micro_batches * (
        micro_batch.forward[1] + micro_batch.backward[1] + rates.states_s(2 * setting.decoded_bytes)
    )
    local_s, wire_s = _sending_s(moved.local_bytes, moved.wire_bytes, layout, rates)
    if setting.engine == "host":
        return _host_step_time(setting, micro_batch, micro_batches, moved, disk, rates)
    if layout.device == "cuda":
        memory_s += _gpu_s(setting, micro_batches, rates)
        exposed_s = _exposed_s(micro_batch, moved, layout, rates)
        return StepTime(True, matmul_s, memory_s, local_s, wire_s, disk_s=0.0, exposed_s=exposed_s)
    memory_s += _calls(setting) * micro_batches * rates.call_s
    gathered, reduced = _COLLECTIVE_PASSES[setting.engine]
    copied = gathered * moved.gathered_bytes + reduced * moved.reduced_bytes
    copied += _DEEPSPEED_UPDATE_BYTES * setting.numel if setting.engine == "deepspeed" else 2 * _states(setting.held)
    memory_s += rates.states_s(copied)
    return StepTime(False, matmul_s, memory_s, local_s, wire_s, disk_s=0.0)


def _host_step_time(
    setting: StepSetting, micro_batch: MicroBatchTime, micro_batches: int, moved: Traffic, disk: DiskUse, rates: Rates
) -> StepTime:
    """Return the time of an optimizer step with engine host.

    On CPU, all work of a rank adds up. A GPU computes a backward pass while the CPU sums gradients, and the first
    forward pass of a step while the CPU receives weights.
    """
    layout, on_gpu = setting.layout, setting.layout.device == "cuda"

    def states_s(moved_bytes: float) -> float:
        return _host_memory_s(moved_bytes, layout) if on_gpu else rates.states_s(moved_bytes)

    # A rank writes each gradient once into its ring buffer. One rank of the host adds the gradient to a sum:
    # the owner of the weight, or the rank that collects the sum for an owner on another host.
    staged = moved.shared_bytes / layout.world_size
    sum_itemsize = 4 if setting.states == "fp32" else 2
    summed = micro_batches * layout.nodes * setting.numel * 2 * (layout.ranks_per_node + sum_itemsize)
    passes = 1.0 if setting.updates_in_one_pass else _UPDATE_PASSES[setting.states]
    update = passes * (6 * setting.held.own_gradients + 2 * setting.held.moments) + disk.update / layout.world_size
    gradients_s, update_s = states_s(2 * staged + summed), states_s(update)
    # Traffic between hosts costs CPU time: gloo and the Linux kernel occupy cores, and ranks verify and add the sums of
    # other hosts and encode patches. Sums are sent during the last backward pass. Updated weights are received during
    # the update and the next forward pass.
    node_bytes = moved.wire_bytes / layout.nodes
    sums = (moved.wire_bytes - moved.wire_weights_bytes) / layout.nodes
    exchange_s = node_bytes / (layout.ranks_per_node * layout.threads_per_rank * rates.gloo_bytes_per_s)
    exchange_s += states_s(_SUM_PASSES * sums / layout.ranks_per_node)
    patches_s = setting.patched_bytes / (layout.ranks_per_node * _PATCH_BYTES_PER_S)
    sent_s = node_bytes / rates.network_bytes_per_s
    (products, rest), (back_products, back_rest) = micro_batch.forward, micro_batch.backward
    matmul_s, memory_s = (
        micro_batches * (products + back_products),
        micro_batches * (rest + back_rest + rates.states_s(2 * setting.decoded_bytes)),
    )
    if on_gpu:
        sent_s = max(sent_s, exchange_s)
        # Copies from and to a GPU overlap with each other, and with the pass in which they are made.
        copies, rate = setting.copies, rates.pcie_bytes_per_s
        in_backward_s = max(gradients_s, staged / rate, micro_batches * copies.backward / rate)
        memory_s += max(0.0, in_backward_s - micro_batches * (back_products + back_rest))
        encoding_s = patches_s / layout.nodes  # during the update
        receiving_s = max(patches_s - encoding_s, (setting.weights_bytes + copies.forward_frozen) / rate)
        # On one host, the update of the next layers overlaps with the first forward pass, too.
        receiving_s, update_s = (max(receiving_s, update_s), 0.0) if layout.nodes == 1 else (receiving_s, update_s)
        memory_s += update_s + encoding_s + max(0.0, receiving_s - products - rest)
        memory_s += (micro_batches - 1) * max(0.0, copies.forward / rate - products - rest)
    else:
        memory_s += update_s + gradients_s + exchange_s + patches_s + _calls(setting) * micro_batches * rates.call_s
    wire_s = max(_TAIL * sent_s, sent_s - micro_batch.step_s - update_s)
    # All disk access overlaps with computation, except for the part of the update before the next forward pass.
    disk_rate = layout.nodes * setting.disk_bytes_per_s
    in_all_s = (disk.update + disk.beside_read + disk.beside_written) / disk_rate
    disk_s = max(disk.update_first / disk_rate, in_all_s - matmul_s - memory_s)
    return StepTime(False, matmul_s, memory_s, 0.0, wire_s, disk_s)


def evaluation_time(
    setting: StepSetting, micro_batch: MicroBatchTime, micro_batches: float, moved: Traffic, rates: Rates
) -> float:
    """Return the seconds of an evaluation of `micro_batches` on each rank."""
    layout, batches = setting.layout, math.ceil(micro_batches)
    gatherings = min(1, batches) if moved.forward_once else batches
    wire, local = moved.forward
    sending = gatherings * sum(_sending_s(local, wire, layout, rates))
    computing = micro_batches * sum(micro_batch.evaluation) + batches * rates.states_s(setting.decoded_bytes)
    if layout.device == "cuda":
        copied = batches * setting.held.weights if setting.offloads else 0
        streamed_s = batches * setting.copies.evaluation / rates.pcie_bytes_per_s
        return max(computing, sending, streamed_s) + copied / _offload_rate(setting, rates)
    if setting.engine == "host":
        return computing
    calls_s = _calls(setting) / 3 * rates.call_s  # a micro-batch of training gathers twice and reduces once
    copied_s = rates.states_s(_COLLECTIVE_PASSES[setting.engine][0] * moved.forward_gathered)
    return computing + sending + gatherings * (copied_s + calls_s)


def _gpu_s(setting: StepSetting, micro_batches: int, rates: Rates) -> float:
    """Return the seconds that a GPU spends on the update, and on casts of gradients into and out of fp32 buffers."""
    held, whole = setting.held, setting.unsharded
    seconds = rates.states_s(2 * held.gradients * micro_batches)
    if not setting.offloads:
        return seconds + rates.states_s(2 * _states(held))
    # With offloaded states, weights are copied to the GPU for each forward and backward pass, and gradients are copied
    # back. The GPU computes nothing during these copies. FSDP2 copies gradients that it adds on the host one by one, to
    # memory that is not pinned.
    gradients = held.own_gradients or held.gradients
    reductions = 1 if whole.gradients else micro_batches
    weights_s = held.weights * (1 if whole.weights else 2 * micro_batches) / _offload_rate(setting, rates)
    gradients_s = gradients * reductions / (_offload_rate(setting, rates) if reductions == 1 else _COPIED_BYTES_PER_S)
    update = 2 * (held.weights + held.moments + gradients)
    return seconds + weights_s + gradients_s + _host_memory_s(update, setting.layout)


def _offload_rate(setting: StepSetting, rates: Rates) -> float:
    """Return the rate at which offloaded weights are copied to a GPU: engine fsdp keeps them in pinned memory."""
    return rates.pcie_bytes_per_s if setting.engine == "fsdp" else _COPIED_BYTES_PER_S


def _host_memory_s(moved_bytes: float, layout: RankLayout) -> float:
    """Return the seconds in which the cores of a rank that computes on a GPU read and write `moved_bytes`."""
    return moved_bytes / (CORE_MEMORY_BYTES_PER_S * layout.threads_per_rank)


def _exposed_s(micro_batch: MicroBatchTime, moved: Traffic, layout: RankLayout, rates: Rates) -> float:
    """Return the seconds of traffic that is sent once per step, beyond the pass of one micro-batch that overlaps."""
    seconds = 0.0
    for sent_bytes, computing in zip(moved.once, (micro_batch.forward, micro_batch.backward), strict=True):
        sent_s = _sending_s(0, sent_bytes, layout, rates)[1]
        seconds += max(_TAIL * sent_s, sent_s - sum(computing))
    return seconds


def _states(held: RankMemory) -> int:
    return held.weights + held.moments + held.gradients


def _calls(setting: StepSetting) -> int:
    """Return the torch calls of the engine per micro-batch, without the calls of the model."""
    if setting.engine == "fsdp":
        return _CALLS_OF_GROUP * setting.groups
    return setting.weights * (_CALLS_OF_WEIGHT if setting.engine == "host" else _CALLS_OF_DEEPSPEED)


def _sending_s(local_bytes: float, wire_bytes: float, layout: RankLayout, rates: Rates) -> tuple[float, float]:
    """Return the seconds of traffic (within hosts, between hosts). CPUs compute nothing while they send."""
    local_s = local_bytes / layout.world_size / rates.socket_bytes_per_s
    if layout.device == "cpu":
        local_s += local_bytes / layout.world_size / rates.gloo_bytes_per_s
    return local_s, wire_bytes / layout.nodes / rates.sent_bytes_per_s(layout)


def _work_s(work: Work, rates: Rates) -> tuple[float, float]:
    """Return the seconds of (matrix products, all other operations)."""
    products = rest = 0.0
    for key, amount in work.items():
        if key[0] == "matmul":
            products += amount * rates.matmul_s(*key[1:])
        elif key[0] == "memory":
            _, operation, tensor_bytes = key
            rest += rates.memory_s(operation, tensor_bytes, amount)
        else:
            rest += amount * rates.call_s
    return products, rest
