"""The shards of engine fsdp: all ranks divide the weights, or the ranks of each node do, and every node has a replica.

With replicas, ranks with the same place on different nodes hold equal shards. Each of them loads and saves another part
of its shard, so that all ranks together read and write every byte once. `Division.exchange_parts` completes the shards.

A frozen weight may be in 8 or 4 bits. FSDP2 lets a subclass of Tensor choose what is gathered, and make the gathered
weight from it. A shard of a compressed weight has the codes and scales of a rank's rows. FSDP2 gathers the codes, frees
the decoded weight when it frees the other weights of the layer, and has it decoded again for the backward pass.
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
from aliquot.engines.base import EngineSpec
from aliquot.models.structure import replace_tensors
from aliquot.tensor_io.code_sizes import CompressedFormat, code_bytes, code_fields, scale_count
from aliquot.tensor_io.parts import Kind, Part, row_ranges
from aliquot.tensor_io.weight_codes import CompressedRange, codes_in

_Form = tuple[CompressedFormat, tuple[int, ...], int]  # format and shape of a weight, and the number of its shards


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


class ShardedCodes(Tensor):
    """The codes of this rank's rows of a weight. FSDP2 sees the padded rows, which take no memory."""

    @staticmethod
    def __new__(cls, codes: Tensor, form: _Form, dtype: torch.dtype) -> Any:
        """`dtype`: of the decoded weight."""
        _, (rows, *row), shards = form
        return Tensor._make_wrapper_subclass(cls, (-(-rows // shards), *row), dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, form: _Form, dtype: torch.dtype) -> None:
        self._codes = codes
        self._form = form
        self._range: CompressedRange | None = None  # None: nothing was loaded or stored since the last `finish`

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Allocate or move the codes as torch allocates or moves rows; a view of the rows is the same shard."""
        shard = args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "dtype"}
        result = shard._codes if func.is_view else func(shard._codes, **options)
        return cls(result, shard._form, shard.dtype) if isinstance(result, Tensor) else result

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        """Return what FSDP2 gathers, and no metadata."""
        return (self._codes,), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        """Decode into `out`, or at the first time return the decoded weight and the memory that FSDP2 frees."""
        (codes,), (base, shape, shards) = gathered, self._form
        decoded = torch.empty(shape, dtype=dtype, device=codes.device) if out is None else out.data
        fields = zip(
            torch.split(codes.view(shards, -1), code_fields(*self._form), dim=1), code_fields(base, shape), strict=True
        )
        whole = torch.cat([field.reshape(-1)[:size] for field, size in fields])
        codes_in(whole, base, shape).decode(0, decoded.view(-1))
        codes.untyped_storage().resize_(0)  # FSDP2 would free the codes together with the decoded weight
        return (decoded, (decoded,)) if out is None else None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._codes.nbytes

    def range(self, shard: int, start: int = 0) -> CompressedRange:
        """Return the range from element `start` of this shard, number `shard`, which this rank loads and saves."""
        if self._range is None:
            scales = torch.full((scale_count(*self._form),), torch.nan)
            self._range = CompressedRange([codes_in(self._codes, *self._form, shard)], scales, start)
        return self._range

    def finish(self, division: Division) -> None:
        """Compress the scales, after all ranks have stored their ranges. Collective."""
        (base, shape, shards), scales = self._form, self.range(division.shard).scales.to(division.mesh.device_type)
        self._range = None
        for values in (self._codes[: code_fields(*self._form)[0]], scales):
            division.exchange_parts(values.view(len(self), -1))
        gathered = torch.empty(shards * len(scales), device=scales.device)
        dist.all_gather_single(gathered, scales, group=division.shard_group)
        whole = gathered.cpu()[: scale_count(base, shape)]
        if not bool(whole.isnan().all()):  # otherwise nothing was stored
            codes_in(self._codes, *self._form, division.shard).set_scales(whole)


def compress(model: nn.Module, spec: EngineSpec, division: Division) -> None:
    """Replace the frozen weights of `spec.compressed`, which fully_shard has sharded on the meta device, by codes."""
    for name, weight in list(model.named_parameters()):
        if isinstance(weight, DTensor) and name in spec.compressed and not weight.requires_grad:
            form: _Form = (spec.base, tuple(weight.shape), division.shards)
            codes = ShardedCodes(torch.empty(code_bytes(*form), dtype=torch.uint8, device="meta"), form, weight.dtype)
            rows = DTensor.from_local(
                codes, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
            )
            replace_tensors(model, {name: nn.Parameter(rows, requires_grad=False)})
