"""Read the header of a safetensors file, which locates every tensor, and check the header because files are untrusted.

A safetensors file has 8 bytes of little-endian header length, a JSON header of this length, then the tensors back to
back.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aliquot.core.decode import parse_json
from aliquot.core.errors import WeightsFileError, reading
from aliquot.core.small_files import LIMIT_BYTES, open_regular, pointer_message

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The location of a tensor: `numel * itemsize` bytes of `file` from `offset`, in row-major order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    file_bytes: int  # size of the whole file
    offset: int  # from the start of the file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def offset_of(self, start: int, numel: int) -> int:
        """Return the offset of elements [start, start + numel) in the file. Raises ValueError if they do not exist."""
        if start < 0 or start + numel > self.numel:
            raise ValueError(f"[{start}, {start + numel}) is not inside {self.name}, {self.numel} elements")
        return self.offset + start * self.itemsize


@dataclass(frozen=True)
class Header:
    """The locations of all tensors of one file, by ascending offset; the first tensor begins at byte `header_bytes`."""

    entries: dict[str, TensorEntry]
    header_bytes: int


def read_header(path: Path) -> Header:
    """Read and check the header of the file `path`. Raises UserError that names the file and the malformed tensor."""
    with reading(path), open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if (message := pointer_message(file.read(64))) is not None:
            raise WeightsFileError(message, path)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if length > size_bytes - 8:
            raise WeightsFileError("truncated, or not a safetensors file: the header is longer than the file", path)
        if length > LIMIT_BYTES:
            raise WeightsFileError(f"header of {length} bytes, more than {LIMIT_BYTES}", path)
        data = file.read(length)
    return Header(_entries(data, path, size_bytes), 8 + length)


def _entries(data: bytes, path: Path, file_bytes: int) -> dict[str, TensorEntry]:
    fields = parse_json(data, path)
    fields.pop("__metadata__", None)
    start = 8 + len(data)
    # An empty tensor comes before the tensor at the same offset.
    entries = sorted(
        (_entry(name, field, path, file_bytes, start) for name, field in fields.items()),
        key=lambda entry: (entry.offset, entry.numel),
    )
    end = start
    for entry in entries:
        if entry.offset != end:
            raise WeightsFileError(f"tensor {entry.name[:200]!r} overlaps another or leaves a gap before it", path)
        end += entry.numel * entry.itemsize
    if end > file_bytes:
        raise WeightsFileError(f"truncated: {file_bytes} bytes where the header asks for {end}", path)
    if end < file_bytes:
        raise WeightsFileError(f"{file_bytes - end} bytes after the last tensor", path)
    return {entry.name: entry for entry in entries}


def _entry(name: str, field: Any, path: Path, file_bytes: int, start: int) -> TensorEntry:
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise WeightsFileError(f"tensor {name[:200]!r}: not an object of dtype, shape and data_offsets", path)
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise WeightsFileError(f"tensor {name[:200]!r}: unknown dtype {ascii(dtype)[:40]}", path)
    if not _sizes(shape) or len(shape) > 64:
        raise WeightsFileError(f"tensor {name[:200]!r}: not a shape: {ascii(shape)[:80]}", path)
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightsFileError(f"tensor {name[:200]!r}: not data_offsets: {ascii(offsets)[:80]}", path)
    entry = TensorEntry(name, DTYPES[dtype], tuple(shape), path, file_bytes, start + offsets[0])
    if entry.numel * entry.itemsize != (count := offsets[1] - offsets[0]):
        raise WeightsFileError(f"tensor {name[:200]!r}: {count} bytes do not hold {dtype} {shape}", path)
    return entry


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
