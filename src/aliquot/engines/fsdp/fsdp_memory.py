"""What the fsdp engine holds, and torch's FSDP2 (fully_shard) for what it gathers, keeps and drops, and when."""

from __future__ import annotations

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout
from aliquot.engines.rank_memory import RankMemory
from aliquot.engines.state_placement import SHARDED, Unsharded
from aliquot.models.model_shape import ModelShape

HALF_BYTES = 16 << 20  # of a rank's staging room in shared memory, which has two


def fsdp_memory(
    config: RunConfig,
    shape: ModelShape,
    layout: RankLayout,
    backward_bytes: int,
    layer_bytes: int,
    kept: Unsharded = SHARDED,
) -> RankMemory:
    """`backward_bytes`: of activations at most in a backward pass; `layer_bytes`: of those of one layer. `kept`: over
    several micro-batches."""
    compute, ranks = 2 if config.train.precision == "bf16" else 4, layout.world_size
    root, *others = shape.padded_groups(ranks)
    learned = shape.learned_padded_groups(ranks)
    own = sum(learned) // ranks
    frozen = (root + sum(others)) // ranks - own
    shared = layout.device == "cpu" and layout.nodes == 1 and ranks > 1 and config.shard.collectives != "gloo"
    # The flat result of the last all-gather is kept while the next one is made; one rank alone copies only.
    flat = compute if ranks > 1 else 0
    largest = max(others)
    forward = compute * root + (compute + flat) * largest
    if kept.weights:
        forward = compute * (root + sum(others)) + flat * largest
    backward = _backward(root, others, learned, compute, flat, ranks, backward_bytes, layer_bytes, kept)
    return RankMemory(
        weights=4 * own + compute * frozen,
        gradients=4 * (sum(learned) if kept.gradients else own),
        gradients_from_start=False,
        moments=8 * own,
        update=0,
        forward=forward,
        backward=backward,
        evaluation=forward,
        shared_weights=0,
        buffers=2 * HALF_BYTES * ranks if shared else 0,
        own_gradients=4 * own,
        # Gradients stay where they are from step to step; the root's of a micro-batch are made beside them.
        holes=4 * learned[0] // ranks if layout.device == "cpu" else 0,
    )


def _backward(
    root: int,
    others: list[int],
    learned: list[int],
    compute: int,
    flat: int,
    ranks: int,
    backward_bytes: int,
    layer_bytes: int,
    kept: Unsharded,
) -> int:
    """Most bytes beside `backward_bytes`, which is as many at its peak as in the last layer.

    `learned`: of the root and of each of the `others`, what has gradients.

    A group in its backward pass: the root and it whole, the next one gathered ahead (flat), its gradients in the
    compute dtype, and the fp32 input of the reduce-scatter of the group before, which FSDP2 keeps until its own.
    Weights that are `kept` are all there until the end; gradients that are have been added to their sums, which are
    counted as gradients, before they are reduced.
    """
    most = done = 0
    of_root, *of_others = learned
    whole = compute * (root + sum(others))
    beside = 0 if kept.gradients else compute  # of a group's gradients while they are reduced
    for at in range(len(others) - 1, -1, -1):
        ahead = flat * others[at - 1] if at and not kept.weights else 0
        before = 4 * of_others[at + 1] if at + 1 < len(others) else 0
        gathered = whole if kept.weights else compute * root + compute * others[at] + ahead
        computing = gathered + compute * of_others[at] + before
        left = whole if kept.weights else compute * root + ahead
        reducing = left + (beside + 4) * of_others[at] + 4 * of_others[at] // ranks
        most = max(most, max(computing, reducing) - done * layer_bytes)
        done += 1
    activations_left = backward_bytes - done * layer_bytes
    freed = backward_bytes - max(0, activations_left)
    gathered = whole if kept.weights else compute * root
    ending = gathered + (beside + 4) * of_root + 4 * of_root // ranks - freed
    return max(most, ending, 0)
