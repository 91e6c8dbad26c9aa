"""How moments are stored: as fp32, or as frugal ones are kept: bf16, or int8 codes and a tensor of scales beside them.

Files do not depend on how many ranks there are: blocks that share a scale divide the rows of a tensor. An engine hands
out and takes fp32 whatever it keeps; what was decoded is encoded as it was, so nothing is lost on the way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from aliquot.core.errors import ResumeError, WeightsFileError
from aliquot.optim.moments import decoded, encoded
from aliquot.optim.sizes import States, block_numel
from aliquot.tensor_io.bytemap import Shape
from aliquot.tensor_io.file_layout import FilesLayout, Laid
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.parts import InMemory, Kind, Part, PartSource, PartStore
from aliquot.tensor_io.transfer import Maps

SCALES = ".scales"  # behind the name of a tensor that is stored as codes
_CODES: dict[Kind, torch.dtype] = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
_CHUNK = 1 << 20  # elements that are encoded at a time


def held(
    tensors: Sequence[tuple[str, Shape]], kind: Kind, learned: Collection[str] | None
) -> Sequence[tuple[str, Shape]]:
    """Of `tensors` those of which there are parts of a kind. `learned`: those that have moments; None: all."""
    return tensors if kind == "weight" or learned is None else [each for each in tensors if each[0] in learned]


def laid_out(
    tensors: Sequence[tuple[str, Shape]], kind: Kind, stem: str, states: States, max_file_bytes: int
) -> FilesLayout:
    """The files of one kind of part."""
    laid: list[Laid] = []
    for name, shape in tensors:
        row_numel = math.prod(shape[1:])
        if kind == "weight" or states == "fp32" or row_numel == 1 or 0 in shape:  # as engines keep them
            laid.append(Laid(name, shape, torch.float32))
        elif states == "bf16":
            laid.append(Laid(name, shape, torch.bfloat16))
        else:
            scales = (math.prod(shape) // block_numel(row_numel),)
            laid += [Laid(name, shape, _CODES[kind]), Laid(name + SCALES, scales, torch.float32, beside=True)]
    return FilesLayout.of_tensors(laid, max_file_bytes, stem)


def values_of(found: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors without scales, as what their values are. Raises UserError for scales that do not belong to codes."""
    values = {}
    for name, entry in found.items():
        scales = found.get(name + SCALES)
        if scales is not None:
            _block(entry, scales)
            entry = replace(entry, dtype=torch.float32)
        if name.removesuffix(SCALES) not in found or not name.endswith(SCALES):
            values[name] = entry
    return values


def _block(codes: TensorEntry, scales: TensorEntry) -> int:
    """Elements that share a scale."""
    row_numel = math.prod(codes.shape[1:])
    block = codes.numel // max(1, scales.numel)
    whole = block > 0 and block * scales.numel == codes.numel and row_numel % block == 0
    if not whole or codes.dtype not in _CODES.values() or scales.dtype != torch.float32:
        raise WeightsFileError(f"{scales.name} are not the scales of {codes.name}", codes.file)
    return block


class StoredParts:
    """The parts of `store` as the files of `maps` hold them: where they are codes, those as fp32, and their scales.

    To be read in the order of the files, codes before their scales; to be written the other way.
    """

    def __init__(self, store: PartSource, maps: Maps) -> None:
        """Raises UserError for a store whose parts begin or end within a block."""
        self._store = store
        self._parts: list[Part] = []
        self._coded: dict[Part, _Coded] = {}
        self._scales: dict[Part, _Coded] = {}
        for part in store.parts():
            self._parts.append(part)
            found = maps.get(part.kind, {})
            if (scales := found.get(part.name + SCALES)) is not None:
                coded = self._coded[part] = _Coded(store, part, _block(found[part.name], scales))
                place = (coded.first, coded.first + len(coded.scales))
                self._parts.append(Part(scales.name, scales.shape, part.kind, *place))
                self._scales[self._parts[-1]] = coded

    def parts(self) -> Sequence[Part]:
        return self._parts

    def view(self, part: Part) -> Tensor | None:
        if part in self._coded or part in self._scales or not isinstance(self._store, InMemory):
            return None
        return self._store.view(part)

    def read(self, part: Part, start: int, out: Tensor) -> None:
        if part in self._coded:
            self._coded[part].read(start, out)
        elif part in self._scales:
            out.copy_(self._scales[part].scales[start - part.start :][: out.numel()])
        else:
            self._store.read(part, start, out)

    def write(self, part: Part, start: int, values: Tensor) -> None:
        if part in self._coded:
            self._coded[part].write(start, values)
        elif part in self._scales:
            self._scales[part].scales[start - part.start :][: values.numel()] = values
        else:
            cast(PartStore, self._store).write(part, start, values)

    def scales(self) -> PartStore:
        """Of all parts these alone."""
        return _Some(self, list(self._scales))

    def values(self) -> PartStore:
        """All parts but these."""
        return _Some(self, [part for part in self._parts if part not in self._scales])


class _Some:
    def __init__(self, stored: StoredParts, parts: Sequence[Part]) -> None:
        self._parts = parts
        self.read, self.write, self.view = stored.read, stored.write, stored.view

    def parts(self) -> Sequence[Part]:
        return self._parts


class _Coded:
    """A part that is stored as codes, one scale a block of so many elements."""

    def __init__(self, store: PartSource, part: Part, block: int) -> None:
        if part.start % block or part.stop % block:
            raise ResumeError(
                f"{part.name}: this checkpoint has frugal moments, which engine deepspeed cannot take: it cuts rows"
            )
        self._store = store
        self._part = part
        self._block = block
        self._squared = part.kind == "exp_avg_sq"
        self.first = part.start // block
        self.scales = torch.empty(part.numel // block)
        self._ahead = torch.empty(0)  # codes that nobody has asked for yet

    def read(self, start: int, out: Tensor) -> None:
        while out.numel():
            if not self._ahead.numel():
                numel = min(self._part.stop - start, max(1, _CHUNK // self._block) * self._block)
                values = torch.empty(numel)
                self._store.read(self._part, start, values)
                self._ahead, scales = encoded(values, self._block, self._squared)
                self.scales[start // self._block - self.first :][: len(scales)] = scales
            count = min(out.numel(), self._ahead.numel())
            out[:count] = self._ahead[:count]
            out, self._ahead, start = out[count:], self._ahead[count:], start + count

    def write(self, start: int, codes: Tensor) -> None:
        first, last = start // self._block, -(-(start + codes.numel()) // self._block)
        whole = torch.zeros((last - first) * self._block)
        inside = slice(start - first * self._block, start - first * self._block + codes.numel())
        whole[inside] = codes
        values = decoded(whole, self.scales[first - self.first : last - self.first], self._block, self._squared)
        cast(PartStore, self._store).write(self._part, start, values[inside])
