"""The model's weights in shared memory, and the orders in which forward and backward passes use the weights.

There is one copy of the weights per NUMA node, from which all ranks of the node compute. The modules of this package
name a weight by its index in the engine's list of `Weight`s. Each rank owns a range of each weight. Only the owner
updates the range, in the copies of all NUMA nodes of its host. An order is a list of weight indices, the same on all
ranks.
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


@dataclass(frozen=True)
class Weight:
    """One weight of the model, and the range of it that each rank owns."""

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]  # [rank]: (start, stop) in the flat weight
    trainable: bool
    dtype: torch.dtype  # in which forward and backward passes use the weight
    rate_ratio: float = 1.0  # multiplies the learning rate

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[1:])

    def shard_numel(self, rank: int) -> int:
        """Return the number of elements that `rank` owns."""
        start, stop = self.ranges[rank]
        return stop - start

    def trainable_numel(self, rank: int) -> int:
        """Return the number of elements for which `rank` has gradients and optimizer state."""
        return self.shard_numel(rank) if self.trainable else 0


@dataclass(frozen=True)
class Counterparts:
    """The ranks that exchange gradient sums and updated weights: one per host, including this rank."""

    ranks: Sequence[int]  # [host]
    host: int  # of this rank

    @property
    def rank(self) -> int:
        """This rank."""
        return self.ranks[self.host]


@dataclass(frozen=True)
class WeightShard:
    """The range of a weight that one rank owns, in every shared copy."""

    weight: Weight
    memories: Sequence[SharedMemory]  # of this NUMA node, then of the others
    offset_bytes: int  # in each of the memories
    numel: int
    start: int  # first element, counted in the whole weight

    @cached_property
    def copies(self) -> list[Tensor]:
        """The range in each of the memories, flat [numel]."""
        return [memory.tensor(self.offset_bytes, (self.numel,), self.weight.dtype) for memory in self.memories]

    def release_pages(self) -> None:
        """Free the memory pages that contain only this range. Until the range is written again, ranks read zeros."""
        first = -(-self.offset_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self.offset_bytes + self.numel * self.weight.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        for memory in self.memories:
            if first < last:
                memory.release_pages(first, last - first)


class SharedWeights:
    """Memory for all weights, one copy per NUMA node of the host."""

    def __init__(
        self, hosts: Hosts, weights: Sequence[Weight], touch: bool, decoded: Sequence[Sequence[int]] = ()
    ) -> None:
        """Share the memory; `touch` allocates all pages now, on the NUMA node that uses them. Collective.

        `decoded`: the weights of each layer that is decoded for each use. Every second layer has the same memory.
        """
        self._weights = weights
        self._offsets: dict[int, int] = {}
        in_turn = {index for indices in decoded for index in indices}
        end = self._place([index for index in range(len(weights)) if index not in in_turn], 0)
        for first in range(2):
            end = max((self._place(indices, end) for indices in decoded[first::2]), default=end)
        local, others = hosts.share_per_numa_node(end, touch=touch)
        self._memories = (local, *others)  # of this NUMA node, then of the others
        self.size_bytes = local.size_bytes

    def _place(self, indices: Sequence[int], start: int) -> int:
        """Place weights one after another from offset `start` on, and return the end."""
        for index in indices:
            self._offsets[index] = start
            start += align(self._weights[index].numel * self._weights[index].dtype.itemsize)
        return start

    @property
    def memory(self) -> Tensor:
        """This NUMA node's copy, uint8 [bytes]."""
        return self._memories[0].tensor(0, (self.size_bytes,), torch.uint8)

    def views(self) -> list[Tensor]:
        """Return all weights in this NUMA node's copy."""
        return [self.view(index) for index in range(len(self._weights))]

    def view(self, index: int) -> Tensor:
        """Return a weight in this NUMA node's copy."""
        weight = self._weights[index]
        return self._memories[0].tensor(self._offsets[index], weight.shape, weight.dtype)

    def shard(self, index: int, rank: int) -> WeightShard:
        """Return the range of a weight that `rank` owns."""
        weight = self._weights[index]
        start = weight.ranges[rank][0]
        offset_bytes = self._offsets[index] + start * weight.dtype.itemsize
        return WeightShard(weight, self._memories, offset_bytes, weight.shard_numel(rank), start)

    def check_published(self, rank: int, absent: Collection[int]) -> None:
        """Check that every rank reads the values that each owner has published. Collective.

        `absent`: weights that are not in memory now. Raises SelfTestError.
        """
        views = [view.view(-1) for view in self.views()]
        starts = [(index, *weight.ranges[rank]) for index, weight in enumerate(self._weights) if index not in absent]
        local = [[index, start, float(views[index][start])] for index, start, stop in starts if start < stop]
        published = gather(local)
        for owner, values in enumerate(published):
            for index, start, value in values:
                seen = float(views[index][start])
                if seen != value and not math.isnan(value):  # NaN is not equal to itself
                    message = f"rank {owner} published {value} and this rank reads {seen}: broken shared memory?"
                    raise SelfTestError(message)


def place(model: nn.Module, weights: Sequence[Weight], tensors: Sequence[Tensor]) -> None:
    """Replace the model's meta parameters by `tensors`, one for each weight. Tied parameters share a tensor."""
    pairs = zip(weights, tensors, strict=True)
    placed = {weight.name: nn.Parameter(tensor, requires_grad=weight.trainable) for weight, tensor in pairs}
    aliases = {alias: placed[name] for alias, name in tied_weights(model).items()}
    replace_tensors(model, placed | aliases)


@dataclass(frozen=True)
class GradientOrder:
    """The order in which a rank stages the gradients of a micro-batch: `head`, then `dense`, then `looked_up`.

    Frozen weights are in no list. A tied embedding may be in two lists, with a gradient as head and as embedding.
    """

    dense: Sequence[int]  # autograd completes these gradients
    head: Sequence[int] = ()  # the fused loss stages this gradient before the backward pass
    looked_up: Sequence[int] = ()  # the engine stages rows of this gradient after the backward pass

    @classmethod
    def from_model(
        cls, model: nn.Module, head: nn.Parameter | None, looked_up: nn.Parameter | None, packs: bool
    ) -> Self:
        """Derive the order from the model.

        `head`: the weight whose gradient the fused loss computes. `looked_up`: the embedding whose gradient the engine
        stages as rows. `packs`: the model takes several documents in one forward pass; its experts then stage their
        gradients themselves.
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
        """Weights that get exactly one whole gradient per micro-batch.

        The looked-up rows of a tied embedding do not count, because they are sent separately.
        """
        return set(self.head) ^ set(self.dense)


def _experts_first(model: nn.Module, order: Sequence[int]) -> list[int]:
    """Move the expert weights of each layer before the layer's other weights in `order`, the backward order.

    Experts get their gradients before weights that come later in the layer's parameter list, such as a norm's.
    """
    parameters = list(model.parameters())
    experts = {id(weight) for weight in experts_weights(model)}
    layer_of = {id(p): at for at, layer in enumerate(decoder_layers(model)) for p in layer.parameters()}
    layer_starts: dict[int, int] = {}  # the index in `order` of a layer's first weight

    def place(at: int, index: int) -> tuple[int, bool]:
        layer = layer_of.get(id(parameters[index]))
        start = at if layer is None else layer_starts.setdefault(layer, at)
        return start, id(parameters[index]) not in experts

    return [index for _, index in sorted(enumerate(order), key=lambda entry: place(*entry))]


class ForwardOrder:
    """The order in which a forward pass uses the weights: `first`, then the weights of the `layers`, then the head."""

    def __init__(self, model: nn.Module, head: nn.Parameter | None) -> None:
        """`head`: the weight that the fused loss multiplies by; None if the model itself computes the logits."""
        index = {id(parameter): at for at, parameter in enumerate(model.parameters())}
        self.layers = [(layer, [index[id(p)] for p in layer.parameters()]) for layer in decoder_layers(model)]
        in_layers = dict.fromkeys(at for _, indices in self.layers for at in indices)
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        last = [] if head is None or head is embedding else [index[id(head)]]
        self.first = [at for at in index.values() if at not in in_layers and at not in last]
        self.all = [*self.first, *in_layers, *last]
