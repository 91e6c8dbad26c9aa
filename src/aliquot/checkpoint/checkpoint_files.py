"""The tensors of a checkpoint and their format in files: fp32, or moments as bf16 or as int8 codes with scales.

The files do not depend on the world size: a block of elements that share a scale never crosses a row, and each rank has
whole rows. Engines pass moments to and from this module as fp32. Encoding decoded values again gives the same codes, so
saving and restoring lose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from aliquot.core.errors import ResumeError, WeightsFileError
from aliquot.optim.moments import decode_int8, encode_int8
from aliquot.optim.sizes import States, block_numel
from aliquot.tensor_io.bytemap import Shape
from aliquot.tensor_io.file_layout import FilesLayout, LayoutEntry
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.parts import FlatParts, Kind, Part, PartSource, PartStore, SelectedParts, ViewableStore
from aliquot.tensor_io.transfer import Maps

SCALES = ".scales"  # suffix of the name of a tensor of scales
_CODES: dict[Kind, torch.dtype] = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
_CHUNK_NUMEL = 1 << 20  # elements that are encoded at a time


@dataclass(frozen=True)
class CheckpointSpec:
    """The contents of a checkpoint, the same on every rank."""

    tensors: Sequence[tuple[str, Shape]]  # all weights of the model in the model's order, or those of the adapter
    config_files: Mapping[str, bytes] = field(default_factory=dict)  # file name -> content; only rank 0 writes
    moment_format: States = "fp32"
    trained: Collection[str] | None = None  # names of the weights with moments; None: all

    def tensors_of(self, kind: Kind) -> Sequence[tuple[str, Shape]]:
        """Return the tensors of one kind: all weights, or the moments of the trained weights under their names."""
        if kind == "weight" or self.trained is None:
            return self.tensors
        return [(name, shape) for name, shape in self.tensors if name in self.trained]

    def layout(self, kind: Kind, stem: str, max_file_bytes: int) -> FilesLayout:
        """Lay out the files for weights, first moments or second moments."""
        entries: list[LayoutEntry] = []
        for name, shape in self.tensors_of(kind):
            row_numel = math.prod(shape[1:])
            # The moments of vectors and of empty tensors are fp32 in any format, as in the engines.
            if kind == "weight" or self.moment_format == "fp32" or row_numel == 1 or 0 in shape:
                entries.append(LayoutEntry(name, shape, torch.float32))
            elif self.moment_format == "bf16":
                entries.append(LayoutEntry(name, shape, torch.bfloat16))
            else:
                scales = (math.prod(shape) // block_numel(row_numel),)
                entries.append(LayoutEntry(name, shape, _CODES[kind]))
                entries.append(LayoutEntry(name + SCALES, scales, torch.float32, same_file=True))
        return FilesLayout.from_entries(entries, max_file_bytes, stem)


def values_of(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the stored tensors as their decoded values: without tensors of scales, and with fp32 in place of codes.

    Raises UserError for scales that do not fit their codes.
    """
    values = {}
    for name, entry in entries.items():
        scales = entries.get(name + SCALES)
        if scales is not None:
            _scale_block(entry, scales)
            entry = replace(entry, dtype=torch.float32)
        if name.removesuffix(SCALES) not in entries or not name.endswith(SCALES):
            values[name] = entry
    return values


def _scale_block(codes: TensorEntry, scales: TensorEntry) -> int:
    """Return the number of elements that share a scale. Raises UserError for scales that do not fit `codes`."""
    row_numel = math.prod(codes.shape[1:])
    block = codes.numel // max(1, scales.numel)
    is_whole = block > 0 and block * scales.numel == codes.numel and row_numel % block == 0
    if not is_whole or codes.dtype not in _CODES.values() or scales.dtype != torch.float32:
        raise WeightsFileError(f"{scales.name} are not the scales of {codes.name}", codes.file)
    return block


class StoredParts:
    """Present the parts of `store` in the format of the files in `maps`: moments as codes and scales instead of fp32.

    Read the codes of a part before the scales, because reading codes computes the scales. Write the scales before the
    codes, because writing codes decodes them with the scales.
    """

    def __init__(self, store: PartSource, maps: Maps) -> None:
        """Match parts and files. Raises UserError if a part of the store begins or ends inside a block of a scale."""
        self._store = store
        self._parts: list[Part] = []
        self._formatted: dict[Part, _CodedPart | _Scales] = {}  # the parts whose format in the files is another one
        for part in store.parts():
            self._parts.append(part)
            entries = maps.get(part.kind, {})
            if (scales := entries.get(part.name + SCALES)) is not None:
                coded = self._formatted[part] = _CodedPart(store, part, _scale_block(entries[part.name], scales))
                stop = coded.first + len(coded.scales)
                self._parts.append(Part(scales.name, scales.shape, part.kind, coded.first, stop))
                self._formatted[self._parts[-1]] = _Scales(coded.scales)

    def parts(self) -> Sequence[Part]:
        return self._parts

    def view(self, part: Part) -> Tensor | None:
        if part in self._formatted or not isinstance(self._store, ViewableStore):
            return None
        return self._store.view(part)

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._formatted.get(part, self._store).read(part, start, out)

    def write(self, part: Part, start: int, values: Tensor) -> None:
        self._formatted.get(part, cast(PartStore, self._store)).write(part, start, values)

    def scales_and_values(self) -> tuple[PartStore, PartStore]:
        """Return two stores: one with the scales only, and one with all other parts."""
        scales = {part.name for part, values in self._formatted.items() if isinstance(values, _Scales)}
        return SelectedParts(self, scales), SelectedParts(self, {part.name for part in self._parts} - scales)


@dataclass(frozen=True)
class _Scales(FlatParts):
    """The scales of a part, which are in memory."""

    scales: Tensor

    def flat(self, part: Part) -> Tensor:
        return self.scales


class _CodedPart:
    """A part whose files hold int8 codes, with one scale for each block of `block_numel` elements."""

    def __init__(self, store: PartSource, part: Part, block_numel: int) -> None:
        if part.start % block_numel or part.stop % block_numel:
            raise ResumeError(
                f"{part.name}: this checkpoint has compressed moments, which engine deepspeed cannot load:"
                " it divides rows"
            )
        self._store = store
        self._block_numel = block_numel
        self._squared = part.kind == "exp_avg_sq"
        self.first = part.start // block_numel
        self.scales = torch.empty(part.numel // block_numel)
        self._pending = torch.empty(0)  # codes that are encoded, but not read yet

    def read(self, part: Part, start: int, out: Tensor) -> None:
        while out.numel():
            if not self._pending.numel():
                numel = min(part.stop - start, max(1, _CHUNK_NUMEL // self._block_numel) * self._block_numel)
                values = torch.empty(numel)
                self._store.read(part, start, values)
                self._pending, scales = encode_int8(values, self._block_numel, self._squared)
                self.scales[start // self._block_numel - self.first :][: len(scales)] = scales
            count = min(out.numel(), self._pending.numel())
            out[:count] = self._pending[:count]
            out, self._pending, start = out[count:], self._pending[count:], start + count

    def write(self, part: Part, start: int, codes: Tensor) -> None:
        first, last = start // self._block_numel, -(-(start + codes.numel()) // self._block_numel)
        whole = torch.zeros((last - first) * self._block_numel)
        offset = start - first * self._block_numel
        inside = slice(offset, offset + codes.numel())
        whole[inside] = codes
        scales = self.scales[first - self.first : last - self.first]
        values = decode_int8(whole, scales, self._block_numel, self._squared)
        cast(PartStore, self._store).write(part, start, values[inside])
