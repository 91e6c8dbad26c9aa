"""Frozen weights in 8 or 4 bits, which FSDP2 shards and gathers as codes and decodes for each use of their layer.

FSDP2 lets a subclass of Tensor choose what is gathered, and make the gathered weight from it. A shard of a compressed
weight has the codes and scales of a rank's rows. FSDP2 frees the decoded weight when it frees the other weights of the
layer, and has it decoded again for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aliquot.engines.base import EngineSpec
from aliquot.engines.fsdp.fsdp_shards import Division
from aliquot.models.structure import replace_tensors
from aliquot.tensor_io.code_sizes import CompressedFormat, code_bytes, code_fields, scale_count
from aliquot.tensor_io.weight_codes import Codes, CompressedRange, codes_in


def compress(model: nn.Module, spec: EngineSpec, division: Division) -> None:
    """Replace the frozen weights of `spec.compressed`, which fully_shard has sharded on the meta device, by codes."""
    for name, parameter in list(model.named_parameters()):
        if name in spec.compressed and not parameter.requires_grad:
            assert isinstance(parameter, DTensor)
            weight = _Weight(tuple(parameter.shape), spec.base, spec.compute_dtype, division)
            codes = torch.empty(code_bytes(*weight.shard), dtype=torch.uint8, device="meta")
            rows = DTensor.from_local(
                ShardedCodes(codes, weight), parameter.device_mesh, parameter.placements, shape=parameter.shape,
                stride=parameter.stride(),
            )  # fmt: skip
            replace_tensors(model, {name: nn.Parameter(rows, requires_grad=False)})


def gathered_code_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of codes that FSDP2 gathers for a weight; 0 if the weight is not compressed."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.nbytes * local.weight.division.shards if isinstance(local, ShardedCodes) else 0


@dataclass(frozen=True)
class _Weight:
    """A compressed weight, and the ranks that divide its rows."""

    shape: tuple[int, ...]
    base: CompressedFormat
    dtype: torch.dtype  # of the decoded weight
    division: Division

    @property
    def shard(self) -> tuple[CompressedFormat, tuple[int, ...], int]:
        """The arguments of the functions of code_sizes.py for a shard."""
        return self.base, self.shape, self.division.shards

    def whole(self, gathered: Tensor) -> Codes:
        """Return the codes of the whole weight from those of all shards, uint8 [bytes]."""
        fields = torch.split(gathered.view(self.division.shards, -1), code_fields(*self.shard), dim=1)
        parts = zip(fields, code_fields(self.base, self.shape), strict=True)
        return codes_in(torch.cat([part.reshape(-1)[:size] for part, size in parts]), self.base, self.shape)


class ShardedCodes(Tensor):
    """The codes of this rank's rows of a weight. FSDP2 sees the padded rows, which take no memory."""

    @staticmethod
    def __new__(cls, codes: Tensor, weight: _Weight) -> Self:
        rows = -(-weight.shape[0] // weight.division.shards)
        shard: Self = Tensor._make_wrapper_subclass(
            cls, (rows, *weight.shape[1:]), dtype=weight.dtype, device=codes.device
        )
        return shard

    def __init__(self, codes: Tensor, weight: _Weight) -> None:
        self.weight = weight
        self._codes = codes
        self._range: CompressedRange | None = None  # None: nothing was loaded or stored since the last `finish`

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Allocate or move the codes as torch allocates or moves rows; a view of the rows is the same shard."""
        shard = args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "dtype"}
        result = shard._codes if func.is_view else func(shard._codes, **options)
        return cls(result, shard.weight) if isinstance(result, Tensor) else result

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        """Return what FSDP2 gathers, and no metadata."""
        return (self._codes,), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        """Decode into `out`, or at the first time return the decoded weight and the memory that FSDP2 frees."""
        decoded = torch.empty(self.weight.shape, dtype=dtype, device=gathered[0].device) if out is None else out.data
        self.weight.whole(gathered[0]).decode(0, decoded.view(-1))
        gathered[0].untyped_storage().resize_(0)  # FSDP2 would free the codes with the decoded weight
        return (decoded, (decoded,)) if out is None else None

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._codes.nbytes

    def range(self, start: int) -> CompressedRange:
        """Return the range from element `start` of this shard on, which this rank loads and saves."""
        if self._range is None:
            scales = torch.full((scale_count(*self.weight.shard),), torch.nan)
            self._range = CompressedRange([self._own_codes()], scales, start)
        return self._range

    def finish(self) -> None:
        """Compress the scales, after all ranks have stored their ranges. Collective."""
        weight, division, rows = self.weight, self.weight.division, self.shape[0]
        scales = self.range(0).scales.to(division.mesh.device_type)
        self._range = None
        for values in (self._codes[: code_fields(*weight.shard)[0]], scales):
            division.exchange_parts(values.view(rows, -1))
        whole = torch.empty(division.shards * len(scales), device=scales.device)
        dist.all_gather_single(whole, scales, group=division.shard_group)
        whole = whole.cpu()[: scale_count(weight.base, weight.shape)]
        if not bool(whole.isnan().all()):  # otherwise nothing was stored
            self._own_codes().set_scales(whole)

    def _own_codes(self) -> Codes:
        weight, division = self.weight, self.weight.division
        return codes_in(self._codes, weight.base, weight.shape, division.shard, division.shards)
