"""Pre-laid-out files: the names, headers and offsets of a set of tensors before any byte of them exists.

They follow from names, shapes, dtype and the size limit alone, as transformers would write them, so every rank knows
where its own ranges go and the files do not depend on how many ranks there are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from aliquot.errors import writing
from aliquot.ranges.bytemap import ByteMap, Shape
from aliquot.ranges.header import DTYPE_NAMES, TensorEntry
from aliquot.ranges.publish import write_file


@dataclass(frozen=True)
class FileLayout:
    """One file: its header as bytes, then `tensors` back to back."""

    name: str
    header: bytes
    tensors: tuple[tuple[str, Shape], ...]
    file_bytes: int


@dataclass(frozen=True)
class FilesLayout:
    """All files of one stem; `index` is `{"<stem>.safetensors.index.json": content}`, empty for a single file."""

    stem: str
    dtype: torch.dtype
    files: tuple[FileLayout, ...]
    index: Mapping[str, bytes]

    @classmethod
    def of(
        cls, tensors: Sequence[tuple[str, Shape]], dtype: torch.dtype, max_shard_bytes: int, stem: str
    ) -> FilesLayout:
        """Tensors in the order given; a file is full when the next tensor would take it past `max_shard_bytes`."""
        shards: list[list[tuple[str, Shape]]] = [[]]
        shard_bytes = 0
        for name, shape in tensors:
            tensor_bytes = math.prod(shape) * dtype.itemsize
            if shards[-1] and shard_bytes + tensor_bytes > max_shard_bytes:
                shards.append([])
                shard_bytes = 0
            shards[-1].append((name, shape))
            shard_bytes += tensor_bytes
        if len(shards) == 1:
            return cls(stem, dtype, (_file(f"{stem}.safetensors", shards[0], dtype),), {})
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        files = tuple(_file(name, shard, dtype) for name, shard in zip(names, shards, strict=True))
        return cls(stem, dtype, files, {f"{stem}.safetensors.index.json": _index(files, dtype)})

    @property
    def total_bytes(self) -> int:
        return sum(file.file_bytes for file in self.files)

    def byte_map(self, directory: Path) -> ByteMap:
        """What `ByteMap.of_directory` finds once the files are there."""
        entries = {}
        for file in self.files:
            offset = len(file.header)
            for name, shape in file.tensors:
                entry = TensorEntry(name, self.dtype, shape, directory / file.name, file.file_bytes, offset)
                entries[name] = entry
                offset += entry.numel * entry.itemsize
        return ByteMap(entries, {directory / file.name: len(file.header) for file in self.files})

    def create_files(self, directory: Path) -> None:
        """Write headers and index, and give every file its final size. Raises UserError."""
        for file in self.files:
            path = directory / file.name
            with writing(path), path.open("xb") as out:
                out.write(file.header)
                out.truncate(file.file_bytes)
                out.flush()
                os.fsync(out.fileno())
        for name, data in self.index.items():
            write_file(directory / name, data)


def _file(name: str, tensors: Sequence[tuple[str, Shape]], dtype: torch.dtype) -> FileLayout:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        fields[tensor] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(name, header, tuple(tensors), len(header) + end)


def _index(files: Sequence[FileLayout], dtype: torch.dtype) -> bytes:
    numel = sum(math.prod(shape) for file in files for _, shape in file.tensors)
    index = {
        "metadata": {"total_parameters": numel, "total_size": numel * dtype.itemsize},
        "weight_map": {name: file.name for file in files for name, _ in file.tensors},
    }
    return (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
