"""How many different kernels a run can meet, whatever its documents, and what they take: of every shape of product
oneDNN keeps one."""

from __future__ import annotations

from aliquot.config.schema import RunConfig
from aliquot.data.batch_size import BatchSize
from aliquot.data.workload import Workload
from aliquot.models.model_shape import ModelShape
from aliquot.nn.attention.tile_sizes import tile_shapes
from aliquot.nn.loss.logits_room import ROW_COUNTS
from aliquot.nn.row_counts import row_counts, row_lengths
from aliquot.planner.micro_batch_cost import MicroBatchCost

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
    """As keeps_large_kernels (machine/matmul.py), of which micro-batches are filled up, has it of this machine."""
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
