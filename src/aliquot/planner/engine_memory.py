"""Memory of a rank in each phase of a run, from what its engine says that it holds.

Categories of private memory: process, weights, gradients, moments, gathered, activations, loss, buffers, streamed,
snapshot, data and allocator; of shared memory, once per host: process, weights, buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from aliquot.config.schema import RunConfig
from aliquot.engines.rank_memory import RankMemory
from aliquot.planner.micro_batch_cost import MicroBatchCost
from aliquot.planner.plan import PhaseMemory
from aliquot.tensor_io.piece_size import MEMORY_BYTES

MIB = 1 << 20

# A rank without a model: Python, torch, transformers and the rest of what training imports, once at its start and once
# it trains. Private, and pages of libraries that all ranks of a host share. Measured as private_bytes and shared_bytes
# of the ledger of a model of 1 M parameters, less what that accounts for (torch 2.13.0+cpu, transformers 5.23, Python
# 3.11, x86-64 Linux 6; tcmalloc and glibc differ by 2 %).
START_PRIVATE_BYTES, START_SHARED_BYTES = 164 * MIB, 88 * MIB
# The process that has started the ranks of a node: Python and torch.
LAUNCHER_BYTES = 182 * MIB
# A process that sends to a dashboard, with what its client starts (wandb 0.31 offline, mlflow 3.17 over a database).
DASHBOARD_BYTES = {"wandb": 86 * MIB, "mlflow": 188 * MIB}
PROCESS_PRIVATE_BYTES, PROCESS_SHARED_BYTES = 308 * MIB, 116 * MIB
COMPILER_BYTES = 64 * MIB  # torch.compile, once it has compiled the layers of a Llama (two cores with AMX)
# Estimates, none measured on a GPU yet: what a process takes of one before its first tensor, NCCL beside it where
# there are other ranks, and what CUDA's libraries take of the host's memory.
CONTEXT_BYTES, NCCL_BYTES, CUDA_HOST_BYTES = 600 * MIB, 512 * MIB, 1024 * MIB


def beside_bytes(config: RunConfig, ranks: int) -> int:
    """What runs on a node beside its ranks."""
    dashboards = sum(DASHBOARD_BYTES.get(service, 0) for service in config.observe.report_to)
    return dashboards + (LAUNCHER_BYTES if ranks > 1 else 0)


@dataclass(frozen=True)
class Beside:
    """Bytes beside model and micro-batches, in the memory that a rank computes in."""

    start: int  # of the process, when it begins
    start_shared: int
    process: int  # when it trains
    process_shared: int
    data: int  # of the index of the data
    loading: int
    snapshot: int  # of parts that are being saved: copies, and pieces on their way


def beside_on_cpu(held: RankMemory, index_bytes: int, snapshot: int, kernels: int, compiles: bool) -> Beside:
    """`kernels`: bytes of those that are beyond what a process is measured with."""
    private = PROCESS_PRIVATE_BYTES + kernels + (COMPILER_BYTES if compiles else 0)
    process = START_PRIVATE_BYTES, START_SHARED_BYTES, private, PROCESS_SHARED_BYTES
    return Beside(*process, index_bytes, MEMORY_BYTES, 0 if held.streamed else snapshot)


def beside_on_gpu(ranks: int) -> Beside:
    """Data, and what is read and written, pass through the host's memory."""
    context = CONTEXT_BYTES + (NCCL_BYTES if ranks > 1 else 0)
    return Beside(context, 0, context, 0, 0, 0, 0)


def phases(
    config: RunConfig,
    held: RankMemory,
    cost: MicroBatchCost,
    beside: Beside,
    building: list[tuple[str, dict[str, int]]],
) -> tuple[PhaseMemory, ...]:
    """Each phase of the ledger. From the first forward pass on nothing shrinks: allocators keep what is freed.

    `building`: private bytes of the phases in which an engine builds itself, beside the process.
    """
    start = PhaseMemory("process start", {"process": beside.start}, {"process": beside.start_shared})
    states = {
        "process": beside.process,
        "data": beside.data,
        "weights": held.weights,
        "gradients": held.gradients if held.gradients_from_start else 0,
        "moments": held.moments,
    }
    shared = {"process": beside.process_shared, "weights": held.shared_weights}
    process = {"process": beside.process_shared}
    built = [PhaseMemory(name, {"process": beside.process, **private}, process) for name, private in building]
    built.append(PhaseMemory("model built", states, process))
    loaded = PhaseMemory("weights loaded", {**states, "buffers": beside.loading}, shared)
    ready = PhaseMemory("optimizer state", {**states, "buffers": beside.loading}, shared)

    loss = max(0, cost.forward_bytes - cost.saved_bytes)
    forward = {"gathered": held.forward, "activations": cost.saved_bytes, "loss": loss}
    backward = {"gathered": held.backward, "activations": cost.backward_bytes}
    with_gradients = {**states, "gradients": held.gradients}
    whole = {**shared, "buffers": held.buffers}
    most = max(sum(forward.values()), sum(backward.values()))
    during = [
        PhaseMemory("first forward", {**states, **forward}, shared),
        PhaseMemory("first backward", {**with_gradients, **_kept(backward, most)}, whole),
        PhaseMemory(
            "first step",
            {**with_gradients, **_kept({"buffers": held.update}, most), "streamed": held.streamed},
            whole,
        ),
    ]
    # The largest block does not find its place again once smaller ones lie where it was.
    slack = cost.largest_bytes + held.holes
    if held.streamed:
        # A part of it is kept unused (machine/allocator.py); the rest are holes of what a layer took and gave back,
        # between what the others have saved.
        slack = max(2 * slack, most - cost.saved_bytes)
    steady = {"gathered": max(held.forward, held.backward), "activations": most - max(held.forward, held.backward)}
    if evaluates(config):
        evaluation = {"gathered": held.evaluation, "activations": cost.evaluation_bytes}
        if sum(evaluation.values()) > sum(steady.values()):
            steady = evaluation
    steady |= {"allocator": slack, "snapshot": beside.snapshot, "streamed": held.streamed}
    return (start, *built, loaded, ready, *during, PhaseMemory("steady peak", {**with_gradients, **steady}, whole))


def host_phases(held: RankMemory, offloaded: bool, index_bytes: int, snapshot: int) -> tuple[PhaseMemory, ...]:
    """The host's memory of a rank that computes on a GPU. `held`: as if nothing were offloaded."""
    shared = {"process": PROCESS_SHARED_BYTES}
    process = {"process": PROCESS_PRIVATE_BYTES + CUDA_HOST_BYTES}
    before = {"weights": held.weights, "moments": held.moments} if offloaded else {}
    trained = (
        {"gradients": held.own_gradients or held.gradients, "buffers": MEMORY_BYTES + held.update} if offloaded else {}
    )
    states = {**process, "data": index_bytes, **before}
    if held.gradients_from_start:
        states |= {name: size for name, size in trained.items() if name == "gradients"}
    # Pieces of files pass through pinned memory, which torch keeps.
    loaded = {**states, "buffers": MEMORY_BYTES}
    private = {
        "process start": process,
        "model built": states,
        "weights loaded": loaded,
        "optimizer state": loaded,
        "first forward": loaded,
        "first backward": {**loaded, **trained},
        "first step": {**loaded, **trained},
        "steady peak": {**loaded, **trained, "snapshot": snapshot},
    }
    return tuple(PhaseMemory(name, sizes, shared) for name, sizes in private.items())


def _kept(now: dict[str, int], most: int) -> dict[str, int]:
    return {**now, "allocator": max(0, most - sum(now.values()))}


def evaluates(config: RunConfig) -> bool:
    """Whether it has data for it."""
    data = config.data
    return (
        data.eval_path is not None or data.eval_split is not None or data.eval_fraction > 0 or bool(data.eval_sources)
    )
