"""The cost of a micro-batch: peak bytes, operations, and cached oneDNN kernels. Imports no torch.

`meta_pass` measures these numbers on meta tensors, and `planned_model` caches them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from aliquot.config.schema import RunConfig
from aliquot.data.workload import BatchSize, Workload
from aliquot.models.model_shape import ModelShape
from aliquot.nn.product_shapes import HOST_LOGITS_BYTES, LOGITS_ROW_COUNTS, row_counts, row_lengths, tile_shapes

# ("matmul", batch, m, k, n, itemsize) -> number of products; ("memory", operation, bytes of the largest tensor) ->
# bytes moved; ("calls",) -> number of operations of any kind.
Work = defaultdict[tuple[Any, ...], float]
Works = tuple[Work, Work]  # of eager layers; of compiled layers

Checkpointing = Literal["none", "selective", "full"]

_KERNELS_IN_CACHE = 1024  # capacity of oneDNN's kernel cache
_KERNEL_BYTES, _AMX_KERNEL_BYTES = 80 << 10, 835 << 10  # per kernel; see machine/matmul.py


@dataclass(frozen=True)
class Step:
    """The settings that determine the cost of a micro-batch."""

    precision: Literal["bf16", "fp32"]
    checkpointing: Checkpointing
    device: Literal["cpu", "cuda"]
    looks_up: bool  # the embedding gradient has a row per token (engine host), not per vocabulary entry
    head_gradient: bool  # the head's gradient is one tensor; engine host instead writes blocks into its ring buffer
    compiled: bool = False  # decoder layers are compiled
    runs_head_twice: bool = False  # for pairs of answers: log-probabilities first, then gradients
    logits_bytes: int = HOST_LOGITS_BYTES  # size of the buffer in which the loss computes logits
    copies_transposed: bool = False  # products with a transposed left side use copies (machine/matmul.py)


WORKS = ("forward", "backward", "evaluation")  # passes of a micro-batch


@dataclass(frozen=True)
class MicroBatchCost:
    """The operations of one micro-batch, and its live bytes without weights and their gradients."""

    saved_bytes: int  # bytes that the forward pass of the layers saves for the backward pass
    layer_bytes: int  # the part of `saved_bytes` that the largest layer saves
    forward_bytes: int  # peak of the forward pass, with head and loss
    backward_bytes: int
    evaluation_bytes: int  # peak of a forward pass without gradients
    largest_bytes: int  # the largest block of a forward and backward pass
    # Numbers of matrix products that differ in shape or memory order, for rows of one length: `tile_products` per tile
    # shape of attention, `expert_products` per number of rows of an expert, `head_products` per number of labelled
    # rows. 0: the model has no such products, or aliquot does not replace its attention and experts.
    tile_products: int
    expert_products: int
    other_products: int
    head_products: int
    forward: Work
    backward: Work
    evaluation: Work  # a forward pass without gradients

    def with_work(self, shares: Sequence[tuple[float, MicroBatchCost]]) -> MicroBatchCost:
        """Replace the work by the weighted sum of the work of `shares`, and keep the bytes."""
        works: dict[str, Any] = {}
        for name in WORKS:
            works[name] = defaultdict(float)
            for share, cost in shares:
                for key, amount in getattr(cost, name).items():
                    works[name][key] += share * amount
        return replace(self, **works)

    def plus(self, more: MicroBatchCost, base: MicroBatchCost, times: int) -> MicroBatchCost:
        """Add `times` times the difference between `more` and `base`.

        The largest block, and the numbers of products, are the larger of `self` and `more`.
        """
        values: dict[str, Any] = {}
        for field in fields(self):
            start, low, high = (getattr(cost, field.name) for cost in (self, base, more))
            if isinstance(start, int):
                values[field.name] = start + times * (high - low)
            else:
                work = {key: start[key] + times * (high[key] - low[key]) for key in start | low | high}
                values[field.name] = defaultdict(float, work)
        maxima = ("largest_bytes", "other_products", "head_products")
        values |= {name: max(getattr(self, name), getattr(more, name)) for name in maxima}
        return MicroBatchCost(**values)


Costs = tuple[MicroBatchCost, MicroBatchCost]  # with eager and with compiled layers, which differ in work alone


def kernel_shapes(
    config: RunConfig, shape: ModelShape, cost: MicroBatchCost, size: BatchSize, isa: tuple[str, ...]
) -> int | None:
    """Return an upper bound on the oneDNN kernels of a rank on CPU: oneDNN caches one per shape of a matrix product.

    None: there is no bound, because every document length adds shapes. `isa`: instruction sets of the processor.
    """
    if not (cost.tile_products and (config.data.packing or _fills_up(config, isa))):
        return None
    length = config.data.sequence_length
    tokens = size.micro * length
    tiles = sum(tile_shapes(tokens, length, window) for window in {kind.window for kind in shape.kinds})
    attention_and_experts = cost.tile_products * tiles + cost.expert_products * row_counts(tokens)
    return attention_and_experts + _row_lengths(config, size) * (
        cost.other_products + LOGITS_ROW_COUNTS * cost.head_products
    )


def kernel_bytes(
    config: RunConfig, cost: MicroBatchCost, size: BatchSize, workload: Workload, isa: tuple[str, ...]
) -> int:
    """Return the bytes of oneDNN kernels that the varying lengths of unpacked sequences add to a rank on CPU.

    One length does not count, because the constants of `memory_phases` contain its kernels. Without data, all lengths
    up to the sequence length count.
    """
    if config.data.packing or config.train.chosen_precision != "bf16":
        return 0
    lengths = workload.row_lengths(size.micro)
    if workload.sequences is None:
        lengths = row_lengths(size.micro, config.data.sequence_length)
    kernels = (lengths - 1) * (cost.other_products + cost.head_products)
    return min(kernels, _KERNELS_IN_CACHE) * (_AMX_KERNEL_BYTES if _fills_up(config, isa) else _KERNEL_BYTES)


def _fills_up(config: RunConfig, isa: tuple[str, ...]) -> bool:
    """Whether unpacked micro-batches are padded to a few lengths, so that few large kernels are cached.

    For this machine, `multiplies_with_amx` (machine/matmul.py) decides the same.
    """
    return config.train.chosen_precision == "bf16" and "amx_bf16" in isa


def _row_lengths(config: RunConfig, size: BatchSize) -> int:
    """Count the different row lengths of micro-batches.

    Packed rows have full length, except for the remainder of a batch, of a source or of an evaluation. Sequences that
    are not packed may have any length.
    """
    if not config.data.packing:
        return row_lengths(size.micro, config.data.sequence_length)
    if config.data.source_count > 1:
        return size.micro
    ends_short = config.train.max_steps is None  # the last step of all epochs takes the remainder
    return min(size.micro, 1 + (size.total % size.micro > 0) + ends_short + config.data.has_evaluation)
