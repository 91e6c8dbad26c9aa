"""The memory of the fsdp engine, including the weights that torch's FSDP2 (fully_shard) gathers and releases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import add

from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import SHARDED, RankMemory, Unsharded
from aliquot.models.model_shape import ModelShape, Shape, numel, padded_share
from aliquot.tensor_io.code_sizes import code_bytes

HALF_BYTES = 16 << 20  # half of a rank's staging buffer in shared memory


def fsdp_memory(
    config: RunConfig,
    shape: ModelShape,
    layout: RankLayout,
    backward_bytes: int,
    layer_bytes: int,
    unsharded: Unsharded = SHARDED,
) -> RankMemory:
    """Return the memory of a rank with engine fsdp.

    `backward_bytes`: the most bytes of activations during a backward pass; `layer_bytes`: the activations of a layer.
    """
    compute, copies = config.train.compute_itemsize, replicas(config, layout)
    ranks = layout.world_size // copies
    root, *layers = shape.padded_groups(ranks)
    sent = gathered_bytes(config, shape, ranks)
    learned = shape.padded_groups(ranks, learned=True)
    owned = sum(learned) // ranks
    shared = ranks > 1 and shares_memory(config, layout)
    sent_gradient = sent_gradient_bytes(config, layout)
    # Flat results of all-gathers, each of which FSDP2 keeps until the next one. One rank only copies.
    flat = sent[1:] if ranks > 1 else [0] * len(layers)
    whole, rounded = compute * (root + sum(layers)), sent_gradient if sent_gradient < 4 else 0
    forward = (
        whole + max(flat) if unsharded.weights else compute * root + max(map(add, [compute * n for n in layers], flat))
    )

    def backward() -> int:
        """Return the peak memory of a backward pass, in bytes, beyond `backward_bytes`.

        `backward_bytes` is the peak of the activations, which is in the last layer.
        During the backward pass of a group, memory holds: the gathered root and group, the flat all-gather result of
        the next group, the group's gradients in the compute dtype, and the fp32 input of the previous group's
        reduce-scatter. FSDP2 keeps this input until the next reduce-scatter. Unsharded weights are all in memory until
        the end. FSDP2 adds unsharded gradients to their sums, which count as gradients, before it reduces the sums.
        """
        most = 0
        learned_root, *learned_layers = learned
        unreduced = 0 if unsharded.gradients else compute  # bytes per gradient of the group that is being reduced
        reduced = 4 + rounded  # bytes per gradient in a reduce-scatter
        for done, at in enumerate(reversed(range(len(layers)))):
            ahead = flat[at - 1] if at and not unsharded.weights else 0
            before = 4 * learned_layers[at + 1] if at + 1 < len(layers) else 0
            gathered = whole if unsharded.weights else compute * root + compute * layers[at] + ahead
            computing = gathered + compute * learned_layers[at] + before
            left = whole if unsharded.weights else compute * root + ahead
            reducing = left + (unreduced + reduced) * learned_layers[at] + reduced * learned_layers[at] // ranks
            most = max(most, max(computing, reducing) - done * layer_bytes)
        freed = min(backward_bytes, len(layers) * layer_bytes)
        gathered = whole if unsharded.weights else compute * root
        ending = gathered + (unreduced + reduced) * learned_root + reduced * learned_root // ranks - freed
        return max(most, ending, 0)

    return RankMemory(
        weights=4 * owned + (sum(sent) - compute * sum(learned)) // ranks,
        gradients=4 * (sum(learned) if unsharded.gradients else owned),
        gradients_from_start=False,
        moments=8 * owned,
        update=0,
        forward=forward,
        backward=backward(),
        evaluation=forward,
        buffers=2 * HALF_BYTES * ranks if shared else 0,
        own_gradients=4 * owned,
        # Gradients that move from step to step leave holes in the heap of a CPU rank. Gradients stay allocated between
        # steps, except for gradients of the root group, which each micro-batch allocates anew. Gradients that replicas
        # add are all allocated anew.
        holes=4 * (sum(learned) if copies > 1 else learned[0]) // ranks if layout.device == "cpu" else 0,
    )


def pinned_bytes(config: RunConfig, shape: ModelShape, layout: RankLayout) -> tuple[int, int]:
    """Return the bytes of a rank's offloaded (weights, gradients), with sizes that are rounded up to powers of two.

    torch rounds sizes of pinned memory so.
    """

    def pinned(weights: Counter[Shape], share_bytes: Callable[[Shape], int]) -> int:
        return sum(count * (1 << (share_bytes(weight) - 1).bit_length()) for weight, count in weights.items())

    ranks, itemsize = layout.world_size, config.train.compute_itemsize
    plain = Counter(shape.weights) - shape.alike - shape.compressed
    learned = pinned(shape.alike, lambda weight: 4 * padded_share(weight, ranks))
    codes = pinned(shape.compressed, lambda weight: code_bytes(shape.base, weight, ranks))
    return learned + codes + pinned(plain, lambda weight: itemsize * padded_share(weight, ranks)), learned


def gathered_bytes(config: RunConfig, shape: ModelShape, ranks: int) -> list[int]:
    """Return the bytes of each group of weights in an all-gather."""
    itemsize = config.train.compute_itemsize
    saved = {
        1 + at: sum(
            itemsize * padded_share(item, ranks) - code_bytes(shape.base, item, ranks) for item in kind.compressed
        )
        for kind in shape.kinds
        for at in kind.positions
    }
    groups = enumerate(shape.padded_groups(ranks))
    return [itemsize * elements - ranks * saved.get(at, 0) for at, elements in groups]


def replicas(config: RunConfig, layout: RankLayout) -> int:
    """Return the number of copies of the whole state; the ranks of a copy divide it."""
    return layout.nodes if config.shard.replicate == "nodes" else 1


def shares_memory(config: RunConfig, layout: RankLayout) -> bool:
    """Whether ranks exchange weights and gradients through shared memory (fsdp_collectives.py)."""
    return layout.device == "cpu" and layout.nodes == replicas(config, layout) and config.shard.collectives != "gloo"


def sent_gradient_bytes(config: RunConfig, layout: RankLayout) -> int:
    """Return the bytes of a gradient in a reduce-scatter over a network or among GPUs."""
    rounds = config.shard.reduce_dtype == "bf16" and layout.world_size > 1 and not shares_memory(config, layout)
    return 2 if rounds else 4


def single_gpu_memory(config: RunConfig, shape: ModelShape, unsharded: Unsharded) -> RankMemory:
    """Return the memory of a single GPU that holds all states of engine fsdp whole.

    `unsharded.gradients`: several micro-batches of a step are summed in fp32.
    """
    compute = config.train.compute_itemsize
    learned = sum(shape.padded_groups(1, learned=True))
    frozen = sum(shape.padded_groups(1)) - learned
    copies = 0 if compute == 4 else compute * learned  # weights that forward and backward passes use
    # The gradients of the embedding: of the look-up, and if the weight is tied, of the head until both are added.
    embedding = compute * numel(shape.embedding) if shape.embedding_learns else 0
    return RankMemory(
        weights=4 * learned + compute * frozen,
        gradients=(4 if unsharded.gradients else compute) * learned,
        gradients_from_start=False,
        moments=8 * learned,
        update=0 if config.train.compile == "layers" or compute == 4 else 4 * learned,
        forward=copies,
        backward=copies + embedding,
        evaluation=copies,
    )
