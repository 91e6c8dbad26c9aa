"""The interface of engines. An engine holds a model, shards the model over the ranks, and runs optimizer steps.

The methods neither take nor return process groups, DTensors or schedulers. `run/training_loop.py` uses engines through
this interface alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, SupportsFloat

import torch
from torch import Tensor, nn

from aliquot.distributed.topology import Topology
from aliquot.engines.engine_plan import SHARDED, OnDisk, Unsharded
from aliquot.models.micro_batch import MicroBatch
from aliquot.tensor_io.code_sizes import CompressedFormat
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
    micro_batch_tokens: int  # the most tokens in a micro-batch
    fused_loss: bool  # the output head is a plain matrix product: the loss needs no full matrix of logits
    packs: bool = True  # one forward pass takes several documents, with aliquot's attention
    looks_up: bool = True  # the model accepts embeddings instead of token ids
    dropout: bool = False  # the model has dropout layers, which draw random numbers in training
    gradient_checkpointing: Literal["none", "selective", "full"] = "none"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    loraplus_lr_ratio: float = 1.0  # learning rate of an adapter's matrices B, as a multiple of that of all weights
    optimizer_states: Literal["fp32", "bf16", "int8"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # dtype of gradients on the network
    micro_batches: int | None = None  # per rank and optimizer step; None: unknown
    compile: Literal["none", "layers"] = "none"
    fp8: bool = False  # for engine fsdp on one GPU: the large linear layers multiply in fp8
    collectives: Literal["auto", "shared_memory", "gloo"] = "gloo"  # for engine fsdp; auto: shared memory if possible
    hooks: PhaseHooks = PhaseHooks()
    deepspeed: Mapping[str, Any] | None = None  # for engine deepspeed: the complete DeepSpeed configuration
    notes: tuple[str, ...] = ()  # console messages about settings that have no effect as written
    offload: bool = False  # keep a GPU's weights, gradients and moments in host memory
    copies_weights: bool = False  # for engine host: compute on the rank's device, from a copy of the weights there
    copied_layers: int = 0  # with `copies_weights`: decoder layers that are copied for each use
    on_disk: OnDisk | None = None  # for engine host: the state to keep in `offload_directory`
    offload_directory: Path = Path()
    unsharded: Unsharded = SHARDED  # for engine fsdp: state that every rank holds whole within an optimizer step
    replicates: bool = False  # for engine fsdp: every node holds all weights and states, sharded over its ranks
    document_tokens: int = 1 << 30  # the most tokens in a document
    base: CompressedFormat = "bf16"  # for engines host and fsdp: format of the frozen weights in `compressed`
    compressed: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()  # names of frozen weights that stay fp32 even if `precision` is bf16

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def eager_checkpointing(self) -> Literal["none", "selective", "full"]:
        """The activation checkpointing by torch.utils.checkpoint: in compiled layers, the compiler does `selective`."""
        compiled = self.compile == "layers" and self.gradient_checkpointing == "selective"
        return "none" if compiled else self.gradient_checkpointing


@dataclass(frozen=True)
class Counters:
    """Memory, traffic and time of this rank. Memory is the current usage; traffic and time count from `build` on."""

    weights_bytes: int
    gradients_bytes: int
    moments_bytes: int
    gathered_bytes: int  # the most bytes of weights that are gathered at once
    activations_bytes: int  # saved by a micro-batch for its backward pass
    wire_bytes: int  # sent by collectives over the network, loopback included
    shared_bytes: int = 0  # this rank's share of the memory that all ranks of the host share
    staged_bytes: int = 0  # handed to other ranks through shared memory
    disk_read_bytes: int = 0  # of offloaded state
    disk_written_bytes: int = 0
    moved_bytes: int = 0  # memory traffic of gradients, sums and updates, which faster cores do not speed up
    reduce_s: float | None = None  # time in gradient sums and collectives; None: not separable from computing
    wait_s: float = 0.0  # the part of reduce_s in which this rank waited for other ranks

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

    The parts of an engine are this rank's flat ranges of the weights and of both Adam moments, without empty ranges.
    """

    @classmethod
    def build(cls, meta: nn.Module, spec: EngineSpec, topology: Topology) -> Self:
        """Shard `meta`, a model on the meta device, and allocate this rank's parts, with undefined values.

        Raises UserError if this engine does not support `spec` on these ranks.
        """
        ...

    @property
    def transport(self) -> str:
        """The transport of the engine's collectives, for messages: `shared memory`, `gloo`, `nccl`, or several."""
        ...

    def ready(self) -> None:
        """Publish the weights that `write` has set, and test the collectives. Collective.

        Call this after all parts are written, and again after parts are written later: from then on, no pass computes
        with an earlier value of a weight. No rank may compute while another rank writes.
        """
        ...

    def resume_at(self, steps: int) -> None:
        """Set the number of completed optimizer steps, which Adam's bias correction needs."""
        ...

    def backward(self, batch: MicroBatch | None, scale: float, last: bool) -> SupportsFloat:
        """Accumulate the gradient of `scale` times the summed loss. Return the unscaled loss, as `evaluate` does.

        With `batch` None, this rank has no data and only joins the collectives. `last`: this is the last micro-batch
        before `step`. Reading the loss may wait for the forward pass on a GPU, but not for the backward pass.
        """
        ...

    def evaluate(self, batch: MicroBatch | None) -> Tensor:
        """Return the summed loss, an fp32 scalar, without gradients. With `batch` None, only join the collectives.

        For `batch.row_loss`, the result is the log-probability of each learned token instead, fp32 [L].
        """
        ...

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        """Clip to the global norm `max_grad_norm`, run AdamW, publish the weights, and zero the gradients.

        An infinite norm does not clip. Return the global norm before clipping; if it is not finite, the step has
        updated nothing.
        """
        ...

    def counters(self) -> Counters: ...

    def generate(self, ids: Tensor, **options: object) -> Tensor:
        """Continue `ids` [1, T] with transformers' generate. Every rank passes the same arguments."""
        ...

    def close(self) -> None: ...
