"""Frozen weights in 8 or 4 bits, which FSDP2 shards and gathers as codes and decodes for each use of their layer.

FSDP2 lets a subclass of Tensor choose what is gathered, and make the gathered weight from it. A shard of a compressed
weight has the codes and scales of a rank's rows. FSDP2 frees the decoded weight when it frees the other weights of the
layer, and has it decoded again for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aliquot.engines.base import EngineSpec
from aliquot.engines.fsdp.fsdp_shards import Division
from aliquot.models.structure import replace_tensors
from aliquot.tensor_io.code_sizes import CompressedFormat, code_bytes, code_fields, scale_count
from aliquot.tensor_io.weight_codes import CompressedRange, codes_in

_Form = tuple[CompressedFormat, tuple[int, ...], int]  # format and shape of a weight, and the number of its shards


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
