"""Plan the layout of safetensors files: file names, headers and tensor offsets, before any tensor is written.

The layout depends only on names, shapes, dtypes and the size limit of a file, as in transformers. Every rank therefore
knows the offsets at which to write its shards, and the files do not depend on the world size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from aliquot.core.errors import writing
from aliquot.core.small_files import flush_to_disk
from aliquot.tensor_io.bytemap import ByteMap, Shape
from aliquot.tensor_io.header import DTYPE_NAMES, TensorEntry
from aliquot.tensor_io.publish import write_file


@dataclass(frozen=True)
class LayoutEntry:
    """A tensor to store in a safetensors file."""

    name: str
    shape: Shape
    dtype: torch.dtype
    same_file: bool = False  # whether the tensor must be in the same file as the tensor before

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """The layout of one file: the header, then `tensors` back to back."""

    name: str
    header: bytes
    tensors: tuple[LayoutEntry, ...]
    file_bytes: int


@dataclass(frozen=True)
class FilesLayout:
    """The layout of all files whose names begin with `stem`, such as "model".

    `index` is `{"<stem>.safetensors.index.json": content}`, or empty for a single file.
    """

    stem: str
    files: tuple[FileLayout, ...]
    index: Mapping[str, bytes]

    @classmethod
    def from_entries(cls, tensors: Sequence[LayoutEntry], max_shard_bytes: int, stem: str) -> FilesLayout:
        """Lay out the tensors in the given order; a new file begins where a tensor would exceed `max_shard_bytes`."""
        shards: list[list[LayoutEntry]] = [[]]
        shard_bytes = 0
        for tensor in tensors:
            if shards[-1] and not tensor.same_file and shard_bytes + tensor.size_bytes > max_shard_bytes:
                shards.append([])
                shard_bytes = 0
            shards[-1].append(tensor)
            shard_bytes += tensor.size_bytes
        if len(shards) == 1:
            return cls(stem, (_file(f"{stem}.safetensors", shards[0]),), {})
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        files = tuple(_file(name, shard) for name, shard in zip(names, shards, strict=True))
        return cls(stem, files, {f"{stem}.safetensors.index.json": _index(files)})

    @property
    def total_bytes(self) -> int:
        return sum(file.file_bytes for file in self.files)

    def byte_map(self, directory: Path) -> ByteMap:
        """Return the location of every tensor, as `ByteMap.from_directory` would read it from the finished files."""
        entries = {}
        for file in self.files:
            offset = len(file.header)
            for tensor in file.tensors:
                location = (directory / file.name, file.file_bytes, offset)
                entries[tensor.name] = TensorEntry(tensor.name, tensor.dtype, tensor.shape, *location)
                offset += tensor.size_bytes
        return ByteMap(entries, {directory / file.name: len(file.header) for file in self.files})

    def create_files(self, directory: Path) -> None:
        """Write the headers and the index of all files, and extend every file to its final size. Raises UserError."""
        for file in self.files:
            path = directory / file.name
            with writing(path), path.open("xb") as out:
                out.write(file.header)
                out.truncate(file.file_bytes)
                flush_to_disk(out)
        for name, data in self.index.items():
            write_file(directory / name, data)


def _file(name: str, tensors: Sequence[LayoutEntry]) -> FileLayout:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size_bytes
        dtype = DTYPE_NAMES[tensor.dtype]
        fields[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(name, header, tuple(tensors), len(header) + end)


def _index(files: Sequence[FileLayout]) -> bytes:
    tensors = [tensor for file in files for tensor in file.tensors]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
            "total_size": sum(tensor.size_bytes for tensor in tensors),
        },
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }
    return (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
