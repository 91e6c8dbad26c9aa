"""The engine interface: what holds, shards and steps the model.

No process group, DTensor, scheduler or JSON crosses it. `run/training_loop.py` knows nothing else of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from aliquot.distributed.topology import Topology
from aliquot.engines.state_placement import SHARDED, OnDisk, Unsharded
from aliquot.models.micro_batch import MicroBatch
from aliquot.tensor_io.parts import PartStore, ViewableStore


@dataclass(frozen=True)
class EngineSpec:
    """What an engine needs to know of the run, all of it fixed at build."""

    precision: Literal["bf16", "fp32"]
    micro_batch_tokens: int  # at most
    fused_loss: bool  # the model's head only multiplies, so logits need not exist as a whole
    packs: bool = True  # several documents in one call, with attention of ours
    looks_up: bool = True  # the model takes embeddings for ids
    dropout: bool = False  # something is dropped in training, at random
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optimizer_states: Literal["fp32", "bf16", "int8"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # of gradients between hosts
    micro_batches: int | None = None  # of a rank and optimizer step; None: not known
    compile: Literal["none", "layers"] = "none"
    collectives: Literal["auto", "shared_memory", "gloo"] = "gloo"  # of engine fsdp; auto: shared memory if possible
    phase: Callable[[str], None] = lambda _: None  # told "forward" and "backward" as each ends, for the memory ledger
    building: Callable[[str], object] = lambda _: None  # told the end of each phase of building, by DeepSpeed
    deepspeed: Mapping[str, Any] | None = None  # DeepSpeed's own settings, complete; only for that engine
    notes: tuple[str, ...] = ()  # lines for the person: settings that do not take effect as written, and why
    offload: bool = False  # of a GPU's weights, gradients and moments to host memory
    on_disk: OnDisk | None = None  # what lies there between its uses, in `offload_directory`; only for engine host
    offload_directory: Path = Path()
    unsharded: Unsharded = SHARDED  # within a step, of a model that packs; only for engine fsdp
    document_tokens: int = 1 << 30  # of one document at most
    exact: frozenset[str] = frozenset()  # weights that learn nothing and are fp32 in bf16 models, too

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step found: the global gradient norm before clipping (nan or inf: nothing was updated)."""

    grad_norm: float


@dataclass(frozen=True)
class Counters:
    """Bytes that the engine accounts for on this rank. Memory is what is live now; traffic counts up from build."""

    weights_bytes: int
    gradients_bytes: int
    moments_bytes: int
    gathered_bytes: int  # most that was gathered at once
    activations_bytes: int  # most that one micro-batch saved for its backward pass
    wire_bytes: int  # handed by this rank to collectives that use the network, be it loopback
    shared_bytes: int = 0  # this rank's share of what all ranks of the host have in common
    staged_bytes: int = 0  # handed to peers through shared memory
    disk_read_bytes: int = 0  # of states that lie on disk
    disk_written_bytes: int = 0
    moved_bytes: int = 0  # read and written in memory for gradients, sums and update: what faster cores wait for
    reduce_s: float | None = None  # seconds since build in sums and collectives; None: not told apart from computing
    wait_s: float = 0.0  # seconds since build that this rank waited for others inside them

    def memory(self) -> dict[str, int]:
        """Bytes by category, for the ledger."""
        return {
            "weights": self.weights_bytes,
            "gradients": self.gradients_bytes,
            "moments": self.moments_bytes,
            "gathered": self.gathered_bytes,
            "activations": self.activations_bytes,
            "shared": self.shared_bytes,
        }

    def traffic(self) -> dict[str, int]:
        """Bytes since the start, for the metrics."""
        return {
            "wire_bytes": self.wire_bytes,
            "staged_bytes": self.staged_bytes,
            "moved_bytes": self.moved_bytes,
            "disk_read_bytes": self.disk_read_bytes,
            "disk_written_bytes": self.disk_written_bytes,
        }

    def inside_s(self) -> tuple[float | None, float]:
        """Seconds of reducing and of waiting that lie inside forward, backward and step."""
        return self.reduce_s, self.wait_s


class Engine(PartStore, ViewableStore, Protocol):
    """One model, its gradients and its optimizer state, 1/N of each on this rank.

    Its parts are this rank's weights and both moments; empty parts are left out.
    """

    @classmethod
    def build(cls, meta: nn.Module, spec: EngineSpec, topology: Topology) -> Self:
        """Shard `meta`, a model on the meta device, and allocate this rank's own parts, not yet filled.

        Raises UserError for what `spec` asks for and this engine cannot do where its ranks are.
        """
        ...

    @property
    def transport(self) -> str:
        """What carries its collectives, for people: `shared memory`, `gloo`, `nccl`, or how they are combined."""
        ...

    def ready(self) -> None:
        """Called once after the parts are filled: buffers in place, self-test done."""
        ...

    def restored(self, steps: int) -> None:
        """The parts come from a checkpoint taken after `steps` optimizer steps (Adam's bias correction needs it)."""
        ...

    def backward(self, batch: MicroBatch | None, scale: float, last: bool) -> Tensor:
        """Add `scale` times the gradient of the summed loss; None only joins the collectives.

        Returns the unscaled summed loss, a detached fp32 scalar. `last`: no micro-batch follows before `step`.
        (DeepSpeed wants to know it beforehand.)
        """
        ...

    def evaluate(self, batch: MicroBatch | None) -> Tensor:
        """The summed loss without gradients, a fp32 scalar; None only joins the collectives."""
        ...

    def step(self, learning_rate: float, max_grad_norm: float | None) -> StepResult:
        """Global norm, clip, AdamW, publish, zero the gradients. A non-finite norm leaves the weights as they are."""
        ...

    def counters(self) -> Counters: ...

    def generate(self, ids: Tensor, **options: object) -> Tensor:
        """Continue `ids` [1, T] with transformers' generate; every rank calls it with the same arguments."""
        ...

    def close(self) -> None: ...
