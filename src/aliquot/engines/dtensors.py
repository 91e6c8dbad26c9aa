"""A DTensor of what an engine holds, for code that speaks DTensor: this rank's rows, sharded along dim 0."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Shard

from aliquot.core.errors import EngineError
from aliquot.engines.base import Engine
from aliquot.tensor_io.parts import Kind, row_ranges

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def dtensor(engine: Engine, name: str, shape: tuple[int, ...], kind: Kind, mesh: DeviceMesh) -> DTensor:
    """Weight `name` of the whole `shape`, or a moment of it, as a fp32 DTensor, Shard(0) over `mesh` of all ranks.

    It lies where the engine holds it, if that is plain fp32 memory in a part of whole rows; otherwise (weights kept as
    two halves, frugal moments) it is a copy. Raises UserError for an engine whose parts are not FSDP2's rows.
    """
    start, stop = row_ranges(shape, mesh.size())[mesh.get_local_rank()]
    part = next((part for part in engine.parts() if (part.name, part.kind) == (name, kind)), None)
    if (part.start, part.stop) != (start, stop) if part is not None else stop > start:
        raise EngineError(f"{name} is not held as whole rows by this engine: no DTensor of it")
    local = engine.view(part) if part is not None else torch.empty(0)
    if local is None or local.dtype != torch.float32:
        local = torch.empty(stop - start)
        if part is not None:
            engine.read(part, start, local)
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    rows = local.view(-1, *shape[1:])
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
