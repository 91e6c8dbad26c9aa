"""The one copy of the weights per NUMA node that all its ranks compute from: where each lies in it, and whose."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from aliquot.distributed.collectives.alignment import aligned
from aliquot.distributed.collectives.hosts import Hosts
from aliquot.engines.host.shard_view import Owned
from aliquot.engines.host.weight import Weight
from aliquot.models.materialise import replace_tensors, tied_weights
from aliquot.optim.decay import decays


class SharedWeights:
    def __init__(self, hosts: Hosts, weights: Sequence[Weight], touch: bool) -> None:
        """`touch`: have its pages now, on their node. Collective over the host."""
        self._weights = weights
        self._offsets = [0]
        for weight in weights:
            self._offsets.append(self._offsets[-1] + aligned(weight.numel * weight.dtype.itemsize))
        own, others = hosts.share_per_numa_node(self._offsets[-1], touch=touch)
        self._memories = (own, *others)  # of this NUMA node, then of the others
        self.size_bytes = own.size_bytes

    def place(self, model: nn.Module) -> None:
        """Replace the meta parameters by views of this node's copy; tied ones by one and the same."""
        placed = {
            weight.name: nn.Parameter(self.view(index), requires_grad=weight.learns)
            for index, weight in enumerate(self._weights)
        }
        aliases = {alias: placed[name] for alias, name in tied_weights(model).items()}
        replace_tensors(model, placed | aliases)

    def view(self, index: int) -> Tensor:
        """A weight in this node's copy."""
        weight = self._weights[index]
        return self._memories[0].tensor(self._offsets[index], weight.shape, weight.dtype)

    def ranges(self, index: int, rank: int) -> list[Tensor]:
        """What `rank` owns of a weight, flat, in every copy."""
        return self.owned(index, rank).copies

    def owned(self, index: int, rank: int) -> Owned:
        weight = self._weights[index]
        start = weight.ranges[rank][0]
        return Owned(
            memories=self._memories,
            offset_bytes=self._offsets[index] + start * weight.dtype.itemsize,
            dtype=weight.dtype,
            numel=weight.numel_of(rank),
            start=start,
            row_numel=weight.row_numel,
            learns=weight.learns,
            decays=decays(weight.name, weight.shape),
        )
