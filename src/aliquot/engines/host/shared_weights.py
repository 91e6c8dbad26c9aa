"""The model's weights in shared memory, and the orders in which forward and backward passes use the weights.

There is one copy per NUMA node, from which all ranks of the node compute. Every module of this package names a weight
by its index in the engine's list of `Weight`s. Each rank owns a range of each weight: it alone updates the range, in
the copies of all NUMA nodes of its host. Every rank follows the same orders, which are lists of indices.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.buffer_sizes import align
from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.shared_memory import SharedMemory
from aliquot.distributed.ranks import gather
from aliquot.models.structure import decoder_layers, replace_tensors, tied_weights
from aliquot.nn.experts.expert_modules import experts_weights
from aliquot.optim.adamw import decays


@dataclass(frozen=True)
class Weight:
    """One weight of the model, and the range of it that each rank owns."""

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]  # [rank]: flat
    trainable: bool
    dtype: torch.dtype  # in which forward and backward passes use the weight

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[1:])

    def shard_numel(self, rank: int) -> int:
        """Return how many elements `rank` owns."""
        start, stop = self.ranges[rank]
        return stop - start

    def trainable_numel(self, rank: int) -> int:
        """Return how many elements `rank` owns gradients and optimizer state of."""
        return self.shard_numel(rank) if self.trainable else 0


@dataclass(frozen=True)
class Counterparts:
    """The ranks that gradient sums and updated weights travel between: one on each host, this rank among them."""

    ranks: Sequence[int]  # [host]
    host: int  # of this rank

    @property
    def rank(self) -> int:
        """This rank."""
        return self.ranks[self.host]


@dataclass(frozen=True)
class WeightShard:
    """The range of a weight that one rank owns, in every shared copy."""

    memories: Sequence[SharedMemory]  # of this NUMA node, then of the others
    offset_bytes: int  # in each of the memories
    dtype: torch.dtype
    numel: int
    start: int  # in the whole weight
    row_numel: int
    trainable: bool
    decays: bool

    @cached_property
    def copies(self) -> list[Tensor]:
        """The range in each of the memories, flat [numel]."""
        return [memory.tensor(self.offset_bytes, (self.numel,), self.dtype) for memory in self.memories]

    def release_pages(self) -> None:
        """Return the pages that hold nothing but this range to the kernel; all ranks then read zeros."""
        first = -(-self.offset_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self.offset_bytes + self.numel * self.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        for memory in self.memories:
            if first < last:
                memory.release_pages(first, last - first)


class SharedWeights:
    """Memory for all weights, one copy per NUMA node of the host."""

    def __init__(self, hosts: Hosts, weights: Sequence[Weight], touch: bool) -> None:
        """Share the memory; `touch` allocates all pages now, on the NUMA node that uses them. Collective."""
        self._weights = weights
        self._offsets = [0]
        for weight in weights:
            self._offsets.append(self._offsets[-1] + align(weight.numel * weight.dtype.itemsize))
        local, others = hosts.share_per_numa_node(self._offsets[-1], touch=touch)
        self._memories = (local, *others)  # of this NUMA node, then of the others
        self.size_bytes = local.size_bytes

    def place(self, model: nn.Module) -> None:
        """Replace the model's meta parameters by views of this node's copy, tied ones by one view."""
        views = [self.view(index) for index in range(len(self._weights))]
        pairs = zip(self._weights, views, strict=True)
        placed = {weight.name: nn.Parameter(view, requires_grad=weight.trainable) for weight, view in pairs}
        aliases = {alias: placed[name] for alias, name in tied_weights(model).items()}
        replace_tensors(model, placed | aliases)

    def view(self, index: int) -> Tensor:
        """Return a weight in this node's copy."""
        weight = self._weights[index]
        return self._memories[0].tensor(self._offsets[index], weight.shape, weight.dtype)

    def shard(self, index: int, rank: int) -> WeightShard:
        """Return the range of a weight that `rank` owns."""
        weight = self._weights[index]
        start = weight.ranges[rank][0]
        return WeightShard(
            memories=self._memories,
            offset_bytes=self._offsets[index] + start * weight.dtype.itemsize,
            dtype=weight.dtype,
            numel=weight.shard_numel(rank),
            start=start,
            row_numel=weight.row_numel,
            trainable=weight.trainable,
            decays=decays(weight.name, weight.shape),
        )

    def check_published(self, rank: int, absent: Collection[int]) -> None:
        """Check that every rank reads the values that each owner has published. Collective.

        `absent`: weights that are not in memory now. Raises SelfTestError.
        """
        views = [self.view(index).view(-1) for index in range(len(self._weights))]
        starts = [(index, *weight.ranges[rank]) for index, weight in enumerate(self._weights) if index not in absent]
        local = [[index, start, float(views[index][start])] for index, start, stop in starts if start < stop]
        published = gather(local)
        for owner, values in enumerate(published):
            for index, start, value in values:
                seen = float(views[index][start])
                if seen != value and not math.isnan(value):  # NaN of a diverged weight arrives, but equals nothing
                    message = f"rank {owner} published {value} and this rank reads {seen}: broken shared memory?"
                    raise SelfTestError(message)


@dataclass(frozen=True)
class GradientOrder:
    """The order in which a rank stages the gradients of a micro-batch: `head`, then `dense`, then `looked_up`.

    Frozen weights are in none of the three. A tied embedding may be in two, because it gets a gradient from each.
    """

    dense: Sequence[int]  # autograd completes these gradients
    head: Sequence[int] = ()  # the fused loss hands over this gradient, before the backward pass
    looked_up: Sequence[int] = ()  # the engine hands over rows of this gradient, after the backward pass

    @classmethod
    def from_model(
        cls, model: nn.Module, head: nn.Parameter | None, looked_up: nn.Parameter | None, packs: bool
    ) -> Self:
        """Derive the order from the model.

        `head`: its gradient comes from the fused loss; `looked_up`: the embedding whose gradient arrives as rows;
        `packs`: several documents are one call, so that experts hand over their gradients one by one.
        """
        parameters = list(model.parameters())
        heads = [at for at, weight in enumerate(parameters) if weight is head and weight.requires_grad]
        embeddings = [at for at, weight in enumerate(parameters) if weight is looked_up and weight.requires_grad]
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        # A tied embedding that the model itself looks up gets a gradient from autograd, too.
        elsewhere = [] if looked_up is None and head is embedding else [*heads, *embeddings]
        dense = [at for at, weight in enumerate(parameters) if weight.requires_grad and at not in elsewhere][::-1]
        return cls(_experts_first(model, dense) if packs else dense, heads, embeddings)

    @property
    def complete_at_once(self) -> set[int]:
        """Weights whose sum of a micro-batch is complete after one whole gradient.

        The rows of an embedding that is the head, too, travel separately and do not count.
        """
        return set(self.head) ^ set(self.dense)


def _experts_first(model: nn.Module, order: Sequence[int]) -> list[int]:
    """Move the experts of each layer before the layer's other weights in `order`, the order of the backward pass.

    Weights that follow the experts in the layer, such as a norm's, get their gradients after the experts do.
    """
    parameters = list(model.parameters())
    experts = {id(weight) for weight in experts_weights(model)}
    layer_of = {id(p): at for at, layer in enumerate(decoder_layers(model)) for p in layer.parameters()}
    layer_starts: dict[int, int] = {}  # the place in `order` of a layer's first weight

    def place(at: int, index: int) -> tuple[int, bool]:
        layer = layer_of.get(id(parameters[index]))
        start = at if layer is None else layer_starts.setdefault(layer, at)
        return start, id(parameters[index]) not in experts

    places = [(*place(at, index), index) for at, index in enumerate(order)]
    return [index for _, _, index in sorted(places, key=lambda entry: entry[:2])]


class ForwardOrder:
    """The order in which a forward pass uses the weights: `first`, those of each of the `layers`, then the head."""

    def __init__(self, model: nn.Module, head: nn.Parameter | None) -> None:
        """`head`: the weight that the fused loss uses after the model; None if the model itself uses it."""
        index = {id(parameter): at for at, parameter in enumerate(model.parameters())}
        self.layers = [(layer, [index[id(p)] for p in layer.parameters()]) for layer in decoder_layers(model)]
        in_layers = dict.fromkeys(at for _, indices in self.layers for at in indices)
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        last = [] if head is None or head is embedding else [index[id(head)]]
        self.first = [at for at in index.values() if at not in in_layers and at not in last]
        self.all = [*self.first, *in_layers, *last]
