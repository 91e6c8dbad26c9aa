"""Memory of a rank in each phase of a run, from what the code of each engine allocates.

Categories of private memory: process, weights, gradients, moments, gathered, activations, loss, buffers, snapshot, data
and allocator; of shared memory, once per host: process, weights, buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from aliquot.config.plan import PhaseMemory
from aliquot.config.schema import RunConfig
from aliquot.plan.activations import MicroBatchCost
from aliquot.plan.rank_layout import RankLayout
from aliquot.plan.shapes import ModelShape, Shape, numel, padded_share

MIB = 1 << 20

# A rank without a model: Python, torch, transformers and the rest of what training imports, once at its start and once
# it trains. Private, and pages of libraries that all ranks of a host share. Measured as private_bytes and shared_bytes
# of the ledger of a model of 1 M parameters, less what that accounts for (torch 2.13.0+cpu, transformers 5.23, Python
# 3.11, x86-64 Linux 6; tcmalloc and glibc differ by 2 %).
START_PRIVATE_BYTES, START_SHARED_BYTES = 164 * MIB, 88 * MIB
PROCESS_PRIVATE_BYTES, PROCESS_SHARED_BYTES = 292 * MIB, 116 * MIB

# collectives/ring.py by way of engines/host/host_gradients.py; engines/fsdp/fsdp_collectives.py;
# optim/blocked_adamw.py; ranges/pipeline.py and ranges/transfer.py
RING_BYTES = 64 * MIB
STAGE_BYTES = 2 * 16 * MIB
UPDATE_SCRATCH_BYTES = 4 * 4 * (1 << 18)
TRANSFER_BYTES = 6 * 4 * MIB + 4 * 4 * MIB
BYTES_PER_PIECE = 48  # of the data's index, data/packing.py: packing and one epoch


@dataclass(frozen=True)
class Held:
    """What an engine holds on its largest rank."""

    weights: int  # private
    gradients: int  # from the start, or from the first backward pass on
    gradients_from_start: bool
    moments: int
    update: int  # more while an update is made
    forward: int  # gathered, beside activations
    backward: int
    evaluation: int
    shared_weights: int  # of a host
    buffers: int  # of a host


def phases(
    config: RunConfig, held: Held, cost: MicroBatchCost, pieces: int, steps: int | None
) -> tuple[PhaseMemory, ...]:
    """Each phase of the ledger. From the first forward pass on nothing shrinks: allocators keep what is freed."""
    own = held.weights + held.moments
    start = PhaseMemory("process start", {"process": START_PRIVATE_BYTES}, {"process": START_SHARED_BYTES})
    states = {
        "process": PROCESS_PRIVATE_BYTES,
        "data": pieces * BYTES_PER_PIECE,
        "weights": held.weights,
        "gradients": held.gradients if held.gradients_from_start else 0,
        "moments": held.moments,
    }
    shared = {"process": PROCESS_SHARED_BYTES, "weights": held.shared_weights}
    built = PhaseMemory("model built", states, {"process": PROCESS_SHARED_BYTES})
    loaded = PhaseMemory("weights loaded", {**states, "buffers": TRANSFER_BYTES}, shared)
    ready = PhaseMemory("optimizer state", {**states, "buffers": TRANSFER_BYTES}, shared)

    loss = max(0, cost.forward_bytes - cost.saved_bytes)
    forward = {"gathered": held.forward, "activations": cost.saved_bytes, "loss": loss}
    backward = {"gathered": held.backward, "activations": cost.backward_bytes}
    with_gradients = {**states, "gradients": held.gradients}
    whole = {**shared, "buffers": held.buffers}
    most = max(sum(forward.values()), sum(backward.values()))
    during = [
        PhaseMemory("first forward", {**states, **forward}, shared),
        PhaseMemory("first backward", {**with_gradients, **_kept(backward, most)}, whole),
        PhaseMemory("first step", {**with_gradients, **_kept({"buffers": held.update}, most)}, whole),
    ]
    # The largest block does not find its place again once smaller ones lie where it was.
    slack = cost.largest_bytes
    steady = {"gathered": max(held.forward, held.backward), "activations": most - max(held.forward, held.backward)}
    if _evaluates(config):
        evaluation = {"gathered": held.evaluation, "activations": cost.evaluation_bytes}
        if sum(evaluation.values()) > sum(steady.values()):
            steady = evaluation
    snapshot = _snapshot(config, own, steps)
    steady |= {"allocator": slack, "snapshot": snapshot}
    return (start, built, loaded, ready, *during, PhaseMemory("steady peak", {**with_gradients, **steady}, whole))


def _kept(now: dict[str, int], most: int) -> dict[str, int]:
    return {**now, "allocator": max(0, most - sum(now.values()))}


def _evaluates(config: RunConfig) -> bool:
    data = config.data
    return data.eval_path is not None or data.eval_split is not None or data.eval_fraction > 0


def _snapshot(config: RunConfig, own_bytes: int, steps: int | None) -> int:
    """Copies of parts that are not on disk yet when the next update comes (checkpoint/live_parts.py)."""
    goes_on = config.checkpoint.every and (steps is None or config.checkpoint.every < steps)
    if not goes_on or not config.checkpoint.asynchronous:
        return 0
    return min(config.checkpoint.buffer_bytes, own_bytes)


def host_memory(config: RunConfig, shape: ModelShape, layout: RankLayout) -> Held:
    """engines/host/host_engine.py: one copy of the weights per NUMA node, all else by rows over all ranks."""
    states, compute = config.train.optimizer_states, 2 if config.train.precision == "bf16" else 4
    shapes = [weight for _, weight in shape.built.tensors]
    own = sum(padded_share(weight, layout.world_size) for weight in shapes)
    kept = 4 if states == "fp32" else 2
    tokens = config.train.per_device_train_batch_size * config.data.sequence_length
    rows = 8 * tokens + tokens * shape.width * compute
    row = max(numel(weight[1:]) for weight in shapes) * compute
    ring = max(RING_BYTES, 2 * row, 2 * rows)
    copies = min(layout.numa_nodes, layout.ranks_per_node)
    return Held(
        weights=2 * own if compute == 2 else 0,
        gradients=kept * own * layout.nodes,  # and its counterparts' parts on the other hosts
        gradients_from_start=True,
        moments=sum(_moment_bytes(weight, layout.world_size, states) for weight in shapes),
        update=UPDATE_SCRATCH_BYTES,
        forward=0,
        backward=0,
        evaluation=0,
        shared_weights=shape.numel * compute * copies,
        buffers=ring * layout.ranks_per_node,
    )


def _moment_bytes(weight: Shape, ranks: int, states: str) -> int:
    """Both moments of the largest part: optim/moments.py."""
    own, row = padded_share(weight, ranks), numel(weight[1:])
    if states == "fp32" or row == 1:
        return 8 * own
    if states == "bf16":
        return 4 * own
    best = max(size for size in range(1, min(row, 256) + 1) if row % size == 0)
    block = best if best >= 32 else row
    return 2 * (own + 4 * (own // block))


def fsdp_memory(config: RunConfig, shape: ModelShape, layout: RankLayout, cost: MicroBatchCost) -> Held:
    """engines/fsdp/fsdp_engine.py, and torch's FSDP2 (fully_shard) for what it gathers, keeps and drops, and when."""
    compute, ranks = 2 if config.train.precision == "bf16" else 4, layout.world_size
    groups = [sum(padded_share(weight, ranks) * ranks for weight in group) for group in shape.groups()]
    root, others = groups[0], groups[1:]
    own = sum(groups) // ranks
    shared = layout.device == "cpu" and layout.nodes == 1 and ranks > 1 and config.shard.collectives != "gloo"
    # The flat result of the last all-gather is kept while the next one is made; one rank alone copies only.
    flat = compute if ranks > 1 else 0
    largest = max(others)
    forward = compute * root + (compute + flat) * largest
    backward = _fsdp_backward(root, others, compute, flat, ranks, cost)
    return Held(
        weights=4 * own,
        gradients=4 * own,
        gradients_from_start=False,
        moments=8 * own,
        update=0,
        forward=forward,
        backward=backward,
        evaluation=forward,
        shared_weights=0,
        buffers=STAGE_BYTES * ranks if shared else 0,
    )


def _fsdp_backward(root: int, others: list[int], compute: int, flat: int, ranks: int, cost: MicroBatchCost) -> int:
    """Most bytes beside `cost.backward_bytes`, which is as many at its peak as in the last layer.

    A group in its backward pass: the root and it whole, the next one gathered ahead (flat), its gradients in the
    compute dtype, and the fp32 input of the reduce-scatter of the group before, which FSDP2 keeps until its own.
    """
    most = 0
    done = 0
    for at in range(len(others) - 1, -1, -1):
        ahead = flat * others[at - 1] if at else 0
        before = 4 * others[at + 1] if at + 1 < len(others) else 0
        computing = compute * root + compute * others[at] + ahead + compute * others[at] + before
        reducing = compute * root + ahead + (compute + 4) * others[at] + 4 * others[at] // ranks
        most = max(most, max(computing, reducing) - done * cost.layer_bytes)
        done += 1
    activations_left = cost.backward_bytes - done * cost.layer_bytes
    freed = cost.backward_bytes - max(0, activations_left)
    ending = (2 * compute + 4) * root + 4 * root // ranks - freed
    return max(most, ending, 0)
