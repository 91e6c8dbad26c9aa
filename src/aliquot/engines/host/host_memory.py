"""What the host engine holds: one copy of the weights per NUMA node, all else by rows over all ranks."""

from __future__ import annotations

from aliquot.collectives.alignment import aligned
from aliquot.config.schema import RunConfig
from aliquot.engines.held_memory import Held
from aliquot.launch.rank_layout import RankLayout
from aliquot.models.model_shape import ModelShape, numel, padded_share
from aliquot.optim.sizes import SCRATCH_BYTES, moment_bytes

# Ranks may be apart by what the ring holds: a layer or more of most models; more gains nothing.
_RING_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20
TAG_BYTES = 64  # before each piece: whose it is


def host_memory(config: RunConfig, shape: ModelShape, layout: RankLayout) -> Held:
    states, compute = config.train.optimizer_states, 2 if config.train.precision == "bf16" else 4
    shares = {weight: padded_share(weight, layout.world_size) for weight in shape.alike}
    own = sum(shares[weight] * count for weight, count in shape.alike.items())
    kept = 4 if states == "fp32" else 2
    tokens = config.train.per_device_train_batch_size * config.data.sequence_length
    row_numel = max(numel(weight[1:]) for weight in shape.alike)
    copies = min(layout.numa_nodes, layout.ranks_per_node)
    moments = sum(
        count * moment_bytes(states, shares[weight], numel(weight[1:])) for weight, count in shape.alike.items()
    )
    return Held(
        weights=2 * own if compute == 2 else 0,
        gradients=kept * own * layout.nodes,  # and its counterparts' parts on the other hosts
        gradients_from_start=True,
        moments=2 * moments,
        update=SCRATCH_BYTES,
        forward=0,
        backward=0,
        evaluation=0,
        shared_weights=shape.numel * compute * copies,
        buffers=ring_bytes(row_numel, looked_up_bytes(tokens, shape.width, compute), compute) * layout.ranks_per_node,
    )


def ring_bytes(row_numel: int, looked_up: int, itemsize: int) -> int:
    """Of a rank's ring: two of its largest pieces fit, be it one row of a weight or the rows of a look-up."""
    return max(_RING_BYTES, 2 * (TAG_BYTES + row_numel * itemsize), 2 * looked_up)


def looked_up_bytes(tokens: int, width: int, itemsize: int) -> int:
    """Of the piece in which the gradient of a look-up of so many tokens travels: their count, their ids, their rows."""
    return aligned(8) + aligned(8 * tokens) + aligned(tokens * width * itemsize)


def piece_edges(rows: int, row_numel: int, itemsize: int) -> tuple[int, ...]:
    """Where a weight is cut into pieces of whole rows, each small enough for the ring."""
    step = max(1, _PIECE_BYTES // (row_numel * itemsize))
    return (*range(0, rows, step), rows)
