"""The shards of engine fsdp: all ranks divide the weights, or the ranks of each node do, and every node has a replica.

With replicas, ranks with the same place on different nodes hold equal shards. Each of them loads and saves another part
of its shard, so that all ranks together read and write every byte once. `Division.exchange_parts` completes the shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from aliquot.core.errors import EngineError
from aliquot.distributed.ranks import gather
from aliquot.distributed.topology import Topology
from aliquot.tensor_io.parts import Kind, Part, row_ranges


@dataclass(frozen=True)
class Division:
    """The ranks that divide the weights, and the replicas of the weights."""

    mesh: DeviceMesh  # one dimension, or two: (replicate, shard)
    shards: int
    shard: int  # index of the shards that this rank holds
    replicas: int = 1
    replica: int = 0  # index of this rank's node

    @classmethod
    def join(cls, replicates: bool, topology: Topology) -> Self:
        """Divide weights over all ranks, or with `replicates` over the ranks of each node. Collective.

        Raises EngineError on every rank if the nodes have unequal numbers of ranks.
        """
        nodes: dict[int, list[int]] = {}
        if replicates:
            for rank, node in enumerate(gather(topology.node_rank)):
                nodes.setdefault(node, []).append(rank)
        if len(nodes) < 2:
            mesh = init_device_mesh(topology.device, (topology.world_size,))
            return cls(mesh, topology.world_size, topology.rank)
        table = list(nodes.values())
        if len({len(ranks) for ranks in table}) > 1:
            raise EngineError(
                "shard.replicate: nodes needs the same number of ranks on every node, but the nodes have"
                f" {', '.join(str(len(ranks)) for ranks in table)}: set the same launch.ranks on all nodes, or"
                " shard.replicate: none"
            )
        # The groups of init_device_mesh would have torch's default timeout instead of that of this run.
        columns = [list(ranks) for ranks in zip(*table, strict=True)]
        world: Any = dist.group.WORLD
        backend = world._get_backend(torch.device(topology.device))
        groups = [
            dist.new_subgroups_by_enumeration(rows, backend.options._timeout, backend.name())[0]  # type: ignore[no-untyped-call]
            for rows in (columns, table)
        ]
        mesh = DeviceMesh.from_group(groups, topology.device, mesh=table, mesh_dim_names=("replicate", "shard"))
        replica = list(nodes).index(topology.node_rank)
        return cls(mesh, len(columns), table[replica].index(topology.rank), len(table), replica)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that together hold one replica."""
        return self.mesh.get_group("shard" if self.replicas > 1 else None)

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """The ranks with equal shards. Only if there are several replicas."""
        return self.mesh.get_group("replicate")

    def exchange_parts(self, values: Tensor) -> None:
        """Complete `values`, a whole shard, with the parts that ranks of other replicas have loaded. Collective."""
        if self.replicas == 1:
            return
        for replica, (start, stop) in enumerate(row_ranges(tuple(values.shape), self.replicas)):
            if stop > start:
                source = int(self.mesh.mesh[replica, self.shard])
                dist.broadcast(values.view(-1)[start:stop], source, group=self.replica_group)

    def close(self) -> None:
        """Destroy the process groups of the replicas. Collective."""
        if self.replicas > 1:
            for group in (self.replica_group, self.shard_group):
                dist.destroy_process_group(group)


@dataclass(frozen=True)
class Shard:
    """This rank's rows of one weight, and the part of them that this rank loads and saves."""

    name: str
    parameter: nn.Parameter  # a DTensor, or a weight that every rank holds whole
    # The rows: an fp32 leaf that the optimizer updates, or if the weight is frozen in compute dtype or ShardedCodes.
    local: Tensor
    first: int  # flat index of the first element of `local` in the whole tensor
    start: int  # the part, as flat indices in the whole tensor
    stop: int

    def part(self, kind: Kind) -> Part:
        return Part(self.name, tuple(self.parameter.shape), kind, self.start, self.stop)

    def select(self, values: Tensor) -> Tensor:
        """Return the elements of the part, flat, of `values`: this rank's rows of the weight, a moment or gradient."""
        return values.view(-1)[self.start - self.first : self.stop - self.first]


def local_shards(model: nn.Module, division: Division, topology: Topology) -> list[Shard]:
    """Return this rank's shard of every weight of `model`, which fully_shard has sharded."""
    shards = []
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if isinstance(parameter, DTensor):
            first, last = row_ranges(shape, division.shards)[division.shard]
            local = parameter.to_local().detach()
            # Whole rows: a part must not begin inside a block of elements that have one scale. Codes have padded rows.
            part = row_ranges(tuple(local.shape), division.replicas)[division.replica]
            start, stop = (min(first + at, last) for at in part)
        else:  # every rank holds such a weight whole
            first, stop = row_ranges(shape, topology.world_size)[topology.rank]
            local, start = parameter.detach().view(-1)[first:stop], first
        shards.append(Shard(name, parameter, local, first, start, stop))
    return shards
