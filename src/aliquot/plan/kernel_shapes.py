"""How many different kernels a run can meet, whatever its documents: of every shape of product oneDNN keeps one."""

from __future__ import annotations

from aliquot.attention.tile_sizes import tile_shapes
from aliquot.config.batch_size import BatchSize
from aliquot.config.schema import RunConfig
from aliquot.experts.row_counts import row_counts
from aliquot.models.model_shape import ModelShape
from aliquot.plan.micro_batch_cost import MicroBatchCost


def kernel_shapes(config: RunConfig, shape: ModelShape, cost: MicroBatchCost, size: BatchSize) -> int | None:
    """Of a rank on CPU, at most; None: as many as documents have lengths."""
    if not cost.tile_products or not config.data.packing:
        return None
    length = config.data.sequence_length
    tokens = size.micro * length
    tiles = sum(tile_shapes(tokens, length, window) for window in {kind.window for kind in shape.kinds})
    of_tiles = cost.tile_products * tiles + cost.expert_products * row_counts(tokens)
    return of_tiles + _row_lengths(config, size) * cost.other_products


def _row_lengths(config: RunConfig, size: BatchSize) -> int:
    """Of micro-batches: whole ones, what is left of a batch, of a source or of an evaluation."""
    if config.data.source_count > 1:
        return size.micro
    data = config.data
    evaluates = bool(data.eval_path or data.eval_split or data.eval_fraction or data.eval_sources)
    cut_short = config.train.max_steps is None  # the last step of all epochs takes what is left
    return min(size.micro, 1 + (size.total % size.micro > 0) + cut_short + evaluates)
