"""Seconds of an optimizer step, by what they are spent on, and which of it the step waits for."""

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

_TAIL = 0.1  # of what travels between hosts: the first weights to come and the last sums to leave, which are waited for
_SUM_PASSES = 5  # over gradients that are sent and received: their checksums, and one more sum
_CALLS_OF_A_GROUP = 600  # about: gathered twice, gradients reduced, hooks around each
_CALLS_OF_A_GRADIENT = 20  # about: staged, told of, summed by its owner
_CALLS_OF_A_PARAMETER = 160  # about: gathered, put into DeepSpeed's bucket and out of it, hooks around each
# DeepSpeed 0.19.8 adds gradients to a bucket, from there to what is reduced, and divides them. An update goes over
# gradients as fp32, their norm and scale and the weights' cast, and torch's AdamW over weights and moments operation by
# operation: bytes read and written of an element that the rank owns.
_REDUCED_PASSES, _DEEPSPEED_UPDATE_BYTES = 6, 24 + 80
_STAGED_BYTES = 4 << 20  # of a piece that is copied
_COPIED_BYTES_PER_S = 8e9  # between a GPU and memory that is not pinned, assumed


@dataclass(frozen=True)
class StepTime:
    """Seconds of the slowest rank. A GPU computes while it sends and gathers; on CPU only engine host does, between
    hosts."""

    overlaps: bool
    matmul_s: float
    memory_s: float  # elementwise operations, gradients and their sums, the update
    local_s: float  # sockets of one host
    wire_s: float  # between hosts, beyond what is done meanwhile
    disk_s: float  # beyond what is done meanwhile

    @property
    def total_s(self) -> float:
        computing, sending = self.matmul_s + self.memory_s, self.local_s + self.wire_s
        return max(computing, sending) if self.overlaps else computing + sending + self.disk_s

    @property
    def bottleneck(self) -> str:
        """What takes longest, and how many times as long as the products: `network-bound 4.1x`."""
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
    """Seconds of one on a rank: (of matrix products, of everything else)."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    evaluation: tuple[float, float]  # without gradients

    @classmethod
    def of(cls, cost: MicroBatchCost, rates: Rates) -> Self:
        return cls(work_s(cost.forward, rates), work_s(cost.backward, rates), work_s(cost.evaluation, rates))

    def of_part(self, part: float) -> Self:
        """Of a micro-batch that is so much smaller."""
        forward, backward, evaluation = (
            (part * products, part * rest) for products, rest in (self.forward, self.backward, self.evaluation)
        )
        return type(self)(forward, backward, evaluation)


@dataclass(frozen=True)
class Owned:
    """What a rank updates, and engine host sums gradients of."""

    numel: int
    weights: int  # parts of so many
    states: States
    itemsize: int  # of a sum
    in_one_pass: bool  # the update is compiled, or there is no master but the weights


def step_time(
    engine: str,
    each: MicroBatchTime,
    held: RankMemory,
    moved: Traffic,
    layout: RankLayout,
    micro_batches: int,
    rates: Rates,
    owned: Owned,
    patched_bytes: int,
    disk: DiskUse,
    disk_bytes_per_s: float,
    offloaded: Unsharded | None,
    groups: int,
) -> StepTime:
    """`micro_batches`: of a rank and optimizer step. `patched_bytes`: of weights of which other hosts are told what has
    changed. `disk_bytes_per_s`: of a node, in both directions together. `offloaded`: None, or what a GPU, whose states
    are in the machine's memory, keeps whole within a step. `groups`: of weights that engine fsdp gathers together."""
    matmul_s = memory_s = disk_s = 0.0
    for of_products, of_rest in (each.forward, each.backward):
        matmul_s += micro_batches * of_products
        memory_s += micro_batches * of_rest
    if engine == "host":
        staged = moved.shared_bytes / layout.world_size
        # Staged once (read and written, but for the head), then read by its owner on this host, or the counterpart of
        # an owner on another one, and added to sums.
        own = held.own_gradients
        memory_s += rates.memory_s("copy_", _STAGED_BYTES, 2 * staged)
        memory_s += rates.overhead_s(_CALLS_OF_A_GRADIENT * owned.weights * micro_batches)
        memory_s += rates.sum_s(owned.itemsize, layout.ranks_per_node, layout.nodes * owned.numel * micro_batches)
        update = 2 * own + 2 * held.moments + 2 * 4 * own / 4 * 2
        update_s = rates.update_s(owned.states, owned.numel, update, owned.in_one_pass)
        update_s += rates.stage_s(disk.update / layout.world_size)
        # Sums go to disk, and layers come, while others compute. An update is as fast as the slower of disk and cores,
        # and all but its beginning is done while the next forward pass computes.
        disk_rate = layout.nodes * disk_bytes_per_s
        to_sum_s = (disk.beside_read + disk.beside_written) / disk_rate
        waits_s = max(0.0, disk.update / disk_rate - update_s)
        to_begin_s = waits_s * disk.update_first / max(1, disk.update)
        forward_s = 0.0 if layout.nodes > 1 else sum(each.forward)
        beside_s = matmul_s + memory_s - min(forward_s, waits_s - to_begin_s)
        disk_s = max(0.0, to_sum_s - beside_s) + max(to_begin_s, waits_s - forward_s)
        memory_s += update_s
        sent_weights = moved.wire_weights_bytes / layout.nodes
        sent_gradients = moved.wire_bytes / layout.nodes - sent_weights
        cores = layout.ranks_per_node * layout.threads_per_rank
        memory_s += rates.gloo_s((sent_weights + sent_gradients) / cores)
        memory_s += rates.stage_s(_SUM_PASSES * sent_gradients / layout.ranks_per_node)
        memory_s += rates.patch_s(patched_bytes / layout.ranks_per_node)  # encoded by owners, decoded by all others
        gradients, weights = rates.wire_s(sent_gradients), rates.wire_s(sent_weights)
        # Sums leave while the last backward pass computes, weights come while owners update and the next forward pass
        # computes.
        hidden = (sum(each.backward), update_s + sum(each.forward))
        wire_s = sum(
            max(_TAIL * sent, sent - beside) for sent, beside in zip((gradients, weights), hidden, strict=True)
        )
    else:
        memory_s += _collected_s(engine, held, moved, layout, micro_batches, rates, owned, offloaded, groups)
    return StepTime(
        layout.device == "cuda",
        matmul_s,
        memory_s,
        _local_s(moved.local_bytes, layout, rates),
        wire_s if engine == "host" else _wire_s(moved.wire_bytes, layout, rates),
        disk_s,
    )


def _collected_s(
    engine: str,
    held: RankMemory,
    moved: Traffic,
    layout: RankLayout,
    micro_batches: int,
    rates: Rates,
    owned: Owned,
    offloaded: Unsharded | None,
    groups: int,
) -> float:
    """What cores, or a GPU, do around collectives, and the update."""
    if layout.device == "cuda":
        # Cast and copied into flat buffers, out of them, gradients to fp32.
        seconds = rates.stage_s(2 * held.gradients * micro_batches)
        if offloaded is None:
            return seconds + rates.stage_s(2 * (held.weights + held.moments + held.gradients))
        # Weights come for a forward and for a backward pass, gradients go: nothing is computed meanwhile.
        own_gradients = held.own_gradients or held.gradients
        comes = held.weights * (1 if offloaded.weights else 2 * micro_batches)
        goes = own_gradients * (1 if offloaded.gradients else micro_batches)
        updated = 2 * (held.weights + held.moments + own_gradients)
        seconds += (comes + goes) / _COPIED_BYTES_PER_S
        return seconds + updated / (CORE_MEMORY_BYTES_PER_S * layout.threads_per_rank)
    seconds = rates.stage_s(_passes_of_gathered(engine, layout) * moved.gathered_bytes)
    if engine == "fsdp":
        # Into a buffer in fp32, in pieces, given; a rank's own are read of all, and added to. Of one rank copied alone.
        passes = 6.5 + (4 / layout.world_size if layout.world_size > 1 else 0)
        seconds += rates.stage_s(passes * moved.reduced_bytes + 2 * (held.weights + held.moments + held.gradients))
        return seconds + rates.overhead_s(_CALLS_OF_A_GROUP * groups * micro_batches)
    seconds += rates.stage_s(_REDUCED_PASSES * moved.reduced_bytes + _DEEPSPEED_UPDATE_BYTES * owned.numel)
    return seconds + rates.overhead_s(_CALLS_OF_A_PARAMETER * owned.weights * micro_batches)


def _passes_of_gathered(engine: str, layout: RankLayout) -> float:
    """Bytes read and written on CPU for each of weights that are whole on a rank."""
    if engine == "deepspeed":
        return 2
    # A rank's own are cast and given; all are taken into a buffer, and from there to where they are used. One rank
    # alone casts and copies.
    return 4 + 5 / layout.world_size if layout.world_size > 1 else 5


def _local_s(moved_bytes: float, layout: RankLayout, rates: Rates) -> float:
    """Seconds of so many bytes that all ranks together send through sockets of their hosts."""
    each = moved_bytes / layout.world_size
    return rates.local_s(each) + (rates.gloo_s(each) if layout.device == "cpu" else 0)


def _wire_s(moved_bytes: float, layout: RankLayout, rates: Rates) -> float:
    """Seconds of so many bytes that all ranks together send between hosts, while nothing is computed on CPU."""
    on_wire = rates.wire_s(moved_bytes / layout.nodes)
    return max(on_wire, rates.gloo_s(moved_bytes / layout.world_size)) if layout.device == "cpu" else on_wire


def evaluation_time(
    engine: str,
    each: MicroBatchTime,
    moved: Traffic,
    layout: RankLayout,
    micro_batches: float,
    rates: Rates,
    copied_bytes: int,
    owned: Owned,
    groups: int,
) -> float:
    """Seconds of an evaluation of so many micro-batches a rank. `copied_bytes`: of weights that come to a GPU for each
    from the machine's memory."""
    batches = math.ceil(micro_batches)
    passes = min(1, batches) if moved.forward_once else batches
    wire, local = (passes * size for size in moved.forward)
    sending = _local_s(local, layout, rates) + _wire_s(wire, layout, rates)
    computing = micro_batches * sum(each.evaluation)
    if layout.device == "cuda":
        return max(computing, sending) + batches * copied_bytes / _COPIED_BYTES_PER_S
    if engine == "host":
        return computing
    # Of three gatherings and reductions of a step this is one.
    calls = (_CALLS_OF_A_GROUP * groups if engine == "fsdp" else _CALLS_OF_A_PARAMETER * owned.weights) / 3
    gathering = rates.stage_s(_passes_of_gathered(engine, layout) * moved.forward_gathered) + rates.overhead_s(calls)
    return computing + passes * gathering + sending


def work_s(work: Work, rates: Rates) -> tuple[float, float]:
    """Seconds of matrix products, and of everything else."""
    products = rest = 0.0
    for key, amount in work.items():
        if key[0] == "matmul":
            _, batch, m, k, n, itemsize = key
            products += amount * rates.matmul_s(batch, m, k, n, itemsize)
        elif key[0] == "memory":
            _, operation, tensor_bytes = key
            rest += rates.memory_s(operation, tensor_bytes, amount)
        else:
            rest += rates.overhead_s(amount)
    return products, rest
