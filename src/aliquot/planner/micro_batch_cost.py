"""What a micro-batch costs: bytes, operations, and kernels to keep. Numbers alone, without torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from aliquot.config.schema import RunConfig
from aliquot.data.batch_size import BatchSize
from aliquot.data.workload import Workload
from aliquot.models.model_shape import ModelShape
from aliquot.nn.attention.tile_sizes import tile_shapes
from aliquot.nn.loss.logits_room import HOST_BYTES, ROW_COUNTS
from aliquot.nn.row_counts import row_counts, row_lengths

# ("matmul", batch, m, k, n, itemsize) -> how often; ("memory", operation, bytes of its largest tensor) -> bytes moved;
# ("calls",) -> operations of any kind.
Work = defaultdict[tuple[Any, ...], float]
Works = tuple[Work, Work]  # of layers as they are; of compiled ones

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Step:
    """How micro-batches are computed."""

    precision: Literal["bf16", "fp32"]
    checkpointing: Checkpointing
    device: Literal["cpu", "cuda"]
    looks_up: bool  # the embedding's gradient is a row a token, as in engine host; else a whole table
    head_gradient: bool  # the head's gradient exists as a whole; engine host writes it into its ring piece by piece
    compiled: bool = False  # decoder layers
    logits_bytes: int = HOST_BYTES  # that the loss keeps at once
    copies_transposed: bool = False  # products with a transposed left side are made from copies (machine/matmul.py)


WORKS = ("forward", "backward", "evaluation")  # passes of a micro-batch


@dataclass(frozen=True)
class MicroBatchCost:
    """Bytes alive beside weights and their gradients, and the operations of one micro-batch."""

    saved_bytes: int  # for the backward pass, when the forward pass of the layers is done
    layer_bytes: int  # of them, what the largest layer saved
    forward_bytes: int  # most at once, head and loss included
    backward_bytes: int
    evaluation_bytes: int  # most at once in a forward pass without gradients
    largest_bytes: int  # the largest block of a forward and backward pass
    # Products of different shape or order, in rows of one length: of attention's tiles and of an expert for each shape
    # of a tile or number of rows, the head's for each number of rows that have a label, and all others. 0: attention
    # and experts are not ours, or there are none.
    tile_products: int
    expert_products: int
    other_products: int
    head_products: int
    forward: Work
    backward: Work
    evaluation: Work  # a forward pass without gradients

    def with_work(self, of: Sequence[tuple[float, MicroBatchCost]]) -> MicroBatchCost:
        """These bytes, and so much of the work of each of those."""
        works: dict[str, Any] = {}
        for name in WORKS:
            works[name] = defaultdict(float)
            for share, cost in of:
                for key, amount in getattr(cost, name).items():
                    works[name][key] += share * amount
        return replace(self, **works)

    def plus(self, other: MicroBatchCost, base: MicroBatchCost, times: int) -> MicroBatchCost:
        """This, and `times` what `other` has more than `base`; the largest block is the largest of all,
        and products are those of the one that has most."""
        values: dict[str, Any] = {}
        for field in fields(self):
            own, less, more = (getattr(each, field.name) for each in (self, base, other))
            if isinstance(own, int):
                values[field.name] = own + times * (more - less)
            else:
                work: Work = defaultdict(float)
                work.update({key: own[key] + times * (more[key] - less[key]) for key in {*own, *less, *more}})
                values[field.name] = work
        of_most = ("largest_bytes", "other_products", "head_products")
        most = {name: max(getattr(self, name), getattr(other, name)) for name in of_most}
        return replace(MicroBatchCost(**values), **most)


Costs = tuple[MicroBatchCost, MicroBatchCost]  # of layers as they are; of compiled ones, which differ in work alone


_KEPT_KERNELS = 1024  # by oneDNN
_KERNEL_BYTES, _AMX_KERNEL_BYTES = 80 << 10, 835 << 10  # see machine/matmul.py


def kernel_shapes(
    config: RunConfig, shape: ModelShape, cost: MicroBatchCost, size: BatchSize, isa: tuple[str, ...]
) -> int | None:
    """Of a rank on CPU, at most; None: as many as documents have lengths. `isa`: of the processor."""
    if not (cost.tile_products and (config.data.packing or _fills_up(config, isa))):
        return None
    length = config.data.sequence_length
    tokens = size.micro * length
    tiles = sum(tile_shapes(tokens, length, window) for window in {kind.window for kind in shape.kinds})
    of_tiles = cost.tile_products * tiles + cost.expert_products * row_counts(tokens)
    return of_tiles + _row_lengths(config, size) * (cost.other_products + ROW_COUNTS * cost.head_products)


def kernel_bytes(
    config: RunConfig, cost: MicroBatchCost, size: BatchSize, workload: Workload, isa: tuple[str, ...]
) -> int:
    """Of a rank on CPU whose sequences are not packed: of the lengths that its micro-batches are seen to have, or of
    all, where no data are known; but for one, which a process that trains is measured with."""
    if config.data.packing or config.train.precision != "bf16":
        return 0
    lengths = workload.row_lengths(size.micro)
    if workload.sequences is None:
        lengths = row_lengths(size.micro, config.data.sequence_length)
    kernels = (lengths - 1) * (cost.other_products + cost.head_products)
    return min(kernels, _KEPT_KERNELS) * (_AMX_KERNEL_BYTES if _fills_up(config, isa) else _KERNEL_BYTES)


def _fills_up(config: RunConfig, isa: tuple[str, ...]) -> bool:
    """Whether cached kernels are large, as `caches_large_kernels` (machine/matmul.py) finds for this machine."""
    return config.train.precision == "bf16" and "amx_bf16" in isa


def _row_lengths(config: RunConfig, size: BatchSize) -> int:
    """Of micro-batches: whole ones, what is left of a batch, of a source or of an evaluation; where sequences are not
    packed, all that there are."""
    if not config.data.packing:
        return row_lengths(size.micro, config.data.sequence_length)
    if config.data.source_count > 1:
        return size.micro
    data = config.data
    evaluates = bool(data.eval_path or data.eval_split or data.eval_fraction or data.eval_sources)
    cut_short = config.train.max_steps is None  # the last step of all epochs takes what is left
    return min(size.micro, 1 + (size.total % size.micro > 0) + cut_short + evaluates)
