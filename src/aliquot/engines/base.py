"""The engine interface. An engine holds a model, shards it over the ranks, and makes optimizer steps.

No process group, DTensor, scheduler or JSON crosses the interface, and `run/training_loop.py` uses nothing else of an
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from aliquot.distributed.topology import Topology
from aliquot.engines.engine_plan import SHARDED, OnDisk, Unsharded
from aliquot.models.micro_batch import MicroBatch
from aliquot.tensor_io.parts import PartStore, ViewableStore


@dataclass(frozen=True)
class PhaseHooks:
    """Callbacks that an engine calls at the end of a phase, for the memory ledger and the clock."""

    step: Callable[[str], None] = lambda _: None  # "forward" and "backward" of every micro-batch
    build: Callable[[str], object] = lambda _: None  # the phases in which DeepSpeed builds its optimizer


@dataclass(frozen=True)
class EngineSpec:
    """The settings of an engine, which do not change after `build`."""

    precision: Literal["bf16", "fp32"]
    micro_batch_tokens: int  # at most
    fused_loss: bool  # the head only multiplies, so that the loss can be computed without all logits at once
    packs: bool = True  # the model takes several documents in one call, through our attention
    looks_up: bool = True  # the model takes embeddings in place of ids
    dropout: bool = False  # training draws random numbers
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optimizer_states: Literal["fp32", "bf16", "int8"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # of gradients between hosts
    micro_batches: int | None = None  # per rank and optimizer step; None: unknown
    compile: Literal["none", "layers"] = "none"
    collectives: Literal["auto", "shared_memory", "gloo"] = "gloo"  # engine fsdp; auto: shared memory if possible
    hooks: PhaseHooks = PhaseHooks()
    deepspeed: Mapping[str, Any] | None = None  # engine deepspeed: its complete settings
    notes: tuple[str, ...] = ()  # for the console: settings that take no effect as written, and why
    offload: bool = False  # a GPU's weights, gradients and moments lie in host memory
    on_disk: OnDisk | None = None  # engine host: state that lies in `offload_directory`
    offload_directory: Path = Path()
    unsharded: Unsharded = SHARDED  # engine fsdp, if the model packs: state that stays whole within a step
    document_tokens: int = 1 << 30  # tokens of a document, at most
    exact: frozenset[str] = frozenset()  # frozen weights that are fp32 in bf16 models, too

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


@dataclass(frozen=True)
class StepResult:
    """The outcome of an optimizer step. If the norm is not finite, nothing was updated."""

    grad_norm: float  # global, before clipping


@dataclass(frozen=True)
class Counters:
    """Bytes and seconds of this rank. Memory is the current amount; traffic and seconds count from `build`."""

    weights_bytes: int
    gradients_bytes: int
    moments_bytes: int
    gathered_bytes: int  # the most that was gathered at once
    activations_bytes: int  # the most that one micro-batch saved for its backward pass
    wire_bytes: int  # handed to collectives that use the network, loopback included
    shared_bytes: int = 0  # this rank's share of the memory that all ranks of the host share
    staged_bytes: int = 0  # handed to other ranks through shared memory
    disk_read_bytes: int = 0  # of offloaded state
    disk_written_bytes: int = 0
    moved_bytes: int = 0  # memory traffic of gradients, sums and updates, which faster cores do not speed up
    reduce_s: float | None = None  # in sums and collectives; None: not separable from computing
    wait_s: float = 0.0  # part of reduce_s in which this rank waited for other ranks

    def memory(self) -> dict[str, int]:
        """Return bytes by category, for the memory ledger."""
        categories = ("weights", "gradients", "moments", "gathered", "activations", "shared")
        return {category: getattr(self, f"{category}_bytes") for category in categories}

    def traffic(self) -> dict[str, int]:
        """Return bytes since the start, for the metrics."""
        names = ("wire_bytes", "staged_bytes", "moved_bytes", "disk_read_bytes", "disk_written_bytes")
        return {name: getattr(self, name) for name in names}

    def inside_s(self) -> tuple[float | None, float]:
        """Return the seconds of reducing and of waiting inside `backward`, `evaluate` and `step`."""
        return self.reduce_s, self.wait_s


class Engine(PartStore, ViewableStore, Protocol):
    """A model, its gradients and its optimizer state, of which each rank holds 1/N.

    The parts of an engine are this rank's ranges of weights and of both moments, without empty ones.
    """

    @classmethod
    def build(cls, meta: nn.Module, spec: EngineSpec, topology: Topology) -> Self:
        """Shard `meta`, a model on the meta device, and allocate this rank's parts, whose values are then undefined.

        Raises UserError if this engine cannot follow `spec` with these ranks.
        """
        ...

    @property
    def transport(self) -> str:
        """The transport of the engine's collectives, for people: `shared memory`, `gloo`, `nccl`, or several."""
        ...

    def ready(self) -> None:
        """Publish the weights and test the collectives. Called once, after all parts are written."""
        ...

    def resume_at(self, steps: int) -> None:
        """Set the number of optimizer steps that the parts have seen, for Adam's bias correction."""
        ...

    def backward(self, batch: MicroBatch | None, scale: float, last: bool) -> Tensor:
        """Add `scale` times the gradient of the summed loss; return the unscaled loss, a detached fp32 scalar.

        `batch`: None only joins the collectives; `last`: no micro-batch follows before `step`.
        """
        ...

    def evaluate(self, batch: MicroBatch | None) -> Tensor:
        """Return the summed loss without gradients, a fp32 scalar; None only joins the collectives."""
        ...

    def step(self, learning_rate: float, max_grad_norm: float | None) -> StepResult:
        """Clip by the global norm, run AdamW, publish the weights, zero the gradients. See `StepResult`."""
        ...

    def counters(self) -> Counters: ...

    def generate(self, ids: Tensor, **options: object) -> Tensor:
        """Continue `ids` [1, T] with transformers' generate. Every rank passes the same arguments."""
        ...

    def close(self) -> None: ...
