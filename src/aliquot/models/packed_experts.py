"""Load the weights of experts in MXFP4, as gpt-oss publishes them, as the values that they encode.

A weight [E, in, out] of the model is stored as W_blocks, uint8 [E, out, in / 32, 16] with two elements per byte, the
first one in the low half, and W_scales, uint8 [E, out, in / 32]. A scale s multiplies 32 elements by 2 ** (s - 127).
See https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aliquot.core.errors import WeightsFileError
from aliquot.tensor_io.bytemap import Shape
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.parts import PartStore
from aliquot.tensor_io.range_io import RangeReader

_BLOCK = 32
_POSITIVE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES = torch.cat([_POSITIVE, -_POSITIVE])


@dataclass(frozen=True)
class PackedWeight:
    """The location of a weight in MXFP4."""

    blocks: TensorEntry
    scales: TensorEntry

    def expert(self, number: int, reader: RangeReader) -> Tensor:
        """Return the weight of an expert, fp32 [in, out]."""
        _, rows, blocks = self.scales.shape
        codes = torch.empty(rows * blocks, _BLOCK // 2, dtype=torch.uint8)
        reader.read(self.blocks, number * codes.numel(), codes.view(-1))
        scales = torch.empty(rows * blocks, dtype=torch.uint8)
        reader.read(self.scales, number * scales.numel(), scales)
        values = _VALUES[torch.stack([codes & 15, codes >> 4], 2).int()].view(-1, _BLOCK)
        return torch.ldexp(values, scales[:, None].int() - 127).view(rows, -1).t()


def is_packed(name: str, stored: Mapping[str, TensorEntry]) -> bool:
    """Return whether the stored tensor `name` has the elements of a weight in MXFP4."""
    return name.endswith("_blocks") and name in stored and f"{name.removesuffix('_blocks')}_scales" in stored


def packed_weights(
    stored: Mapping[str, TensorEntry], shapes: Mapping[str, Shape], directory: Path
) -> dict[str, PackedWeight]:
    """Return the weights of `shapes` that the files store in MXFP4. Raises WeightsFileError for a wrong shape."""
    weights = {
        name: PackedWeight(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        for name in shapes
        if is_packed(f"{name}_blocks", stored)
    }
    for name, packed in weights.items():
        experts, columns, rows = (*shapes[name], 0, 0)[:3]
        expected = (experts, rows, columns // _BLOCK)
        has_dtype = packed.blocks.dtype == packed.scales.dtype == torch.uint8
        if not has_dtype or packed.scales.shape != expected or packed.blocks.shape != (*expected, _BLOCK // 2):
            raise WeightsFileError(
                f"{name}_blocks is {packed.blocks.dtype} {list(packed.blocks.shape)}, which is not MXFP4 for"
                f" {list(shapes[name])}",
                directory,
            )
    return weights


def fill_packed(
    store: PartStore,
    weights: Mapping[str, PackedWeight],
    check: Callable[[TensorEntry, int, Tensor], None],
) -> int:
    """Write the values of this rank's parts of `weights` to `store`, and return the number of bytes read.

    `check` receives each range of values, as `tensor_io.transfer.fill` gives it. Raises UserError.
    """
    read_bytes = 0
    with RangeReader() as reader:
        for part in store.parts():
            if part.kind != "weight" or part.name not in weights:
                continue
            packed = weights[part.name]
            numel = packed.blocks.numel * 2 // packed.blocks.shape[0]
            for number in range(part.start // numel, -(-part.stop // numel)):
                first, last = max(part.start, number * numel), min(part.stop, (number + 1) * numel)
                values = packed.expert(number, reader).reshape(-1)[first - number * numel : last - number * numel]
                check(packed.blocks, first, values)
                store.write(part, first, values)
                read_bytes += numel // 2 + numel // _BLOCK
    return read_bytes
