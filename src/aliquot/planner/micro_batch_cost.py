"""The cost of a micro-batch: bytes, operations, and oneDNN kernels to keep. Numbers alone, without torch.

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

# ("matmul", batch, m, k, n, itemsize) -> how often; ("memory", operation, bytes of its largest tensor) -> bytes moved;
# ("calls",) -> operations of any kind.
Work = defaultdict[tuple[Any, ...], float]
Works = tuple[Work, Work]  # of eager layers; of compiled layers

Checkpointing = Literal["none", "selective", "full"]

_KERNELS_IN_CACHE = 1024  # of oneDNN
_KERNEL_BYTES, _AMX_KERNEL_BYTES = 80 << 10, 835 << 10  # see machine/matmul.py


@dataclass(frozen=True)
class Step:
    """The settings that determine the cost of a micro-batch."""

    precision: Literal["bf16", "fp32"]
    checkpointing: Checkpointing
    device: Literal["cpu", "cuda"]
    looks_up: bool  # the embedding's gradient is a row for each token, as in engine host, and not a whole table
    head_gradient: bool  # the head's gradient exists as a whole; engine host writes it into its ring piece by piece
    compiled: bool = False  # decoder layers
    logits_bytes: int = HOST_LOGITS_BYTES  # that the loss keeps at once
    copies_transposed: bool = False  # products with a transposed left side use copies (machine/matmul.py)


WORKS = ("forward", "backward", "evaluation")  # passes of a micro-batch


@dataclass(frozen=True)
class MicroBatchCost:
    """Live bytes, without weights and their gradients, and the operations of one micro-batch."""

    saved_bytes: int  # for the backward pass, at the end of the forward pass of the layers
    layer_bytes: int  # of these, the largest layer's
    forward_bytes: int  # peak, with head and loss
    backward_bytes: int
    evaluation_bytes: int  # peak of a forward pass without gradients
    largest_bytes: int  # the largest block of a forward and backward pass
    # Products of different shape or order, in rows of one length: of attention's tiles and of an expert for each shape
    # of a tile or number of rows, the head's for each number of rows that have a label, and all others. 0: attention
    # and experts are not aliquot's own, or the model has none.
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
        """Add the difference of `more` and `base` several times.

        The largest block, and the numbers of products, are the larger of `self` and `more`.
        """
        values: dict[str, Any] = {}
        for field in fields(self):
            start, low, high = (getattr(cost, field.name) for cost in (self, base, more))
            if isinstance(start, int):
                values[field.name] = start + times * (high - low)
            else:
                work: Work = defaultdict(float)
                work.update({key: start[key] + times * (high[key] - low[key]) for key in {*start, *low, *high}})
                values[field.name] = work
        maxima = ("largest_bytes", "other_products", "head_products")
        values |= {name: max(getattr(self, name), getattr(more, name)) for name in maxima}
        return MicroBatchCost(**values)


Costs = tuple[MicroBatchCost, MicroBatchCost]  # of eager and of compiled layers, which differ in work alone


def kernel_shapes(
    config: RunConfig, shape: ModelShape, cost: MicroBatchCost, size: BatchSize, isa: tuple[str, ...]
) -> int | None:
    """Return a bound on the shapes of products of a rank on CPU, for each of which oneDNN keeps a kernel.

    None: no bound, because each length of a document has shapes of its own. `isa`: instruction sets of the processor.
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
    """Return the bytes of kernels of a rank on CPU whose sequences are not packed, for every length but one.

    The constants of `memory_plan` contain the kernels of one length. Without data, all lengths count.
    """
    if config.data.packing or config.train.precision != "bf16":
        return 0
    lengths = workload.row_lengths(size.micro)
    if workload.sequences is None:
        lengths = row_lengths(size.micro, config.data.sequence_length)
    kernels = (lengths - 1) * (cost.other_products + cost.head_products)
    return min(kernels, _KERNELS_IN_CACHE) * (_AMX_KERNEL_BYTES if _fills_up(config, isa) else _KERNEL_BYTES)


def evaluates(config: RunConfig) -> bool:
    """Whether the run has held-out data."""
    data = config.data
    return (
        data.eval_path is not None or data.eval_split is not None or data.eval_fraction > 0 or bool(data.eval_sources)
    )


def _fills_up(config: RunConfig, isa: tuple[str, ...]) -> bool:
    """Whether micro-batches are filled up, as `caches_large_kernels` (machine/matmul.py) decides for this machine."""
    return config.train.precision == "bf16" and "amx_bf16" in isa


def _row_lengths(config: RunConfig, size: BatchSize) -> int:
    """Count the lengths of micro-batches: whole ones, and remainders of a batch, of a source or of an evaluation.

    Sequences that are not packed have all lengths.
    """
    if not config.data.packing:
        return row_lengths(size.micro, config.data.sequence_length)
    if config.data.source_count > 1:
        return size.micro
    ends_short = config.train.max_steps is None  # the last step of all epochs takes the remainder
    return min(size.micro, 1 + (size.total % size.micro > 0) + ends_short + evaluates(config))
