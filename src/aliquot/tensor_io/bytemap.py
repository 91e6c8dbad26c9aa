"""The byte map of a directory: where every tensor lies, from the safetensors headers and their index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aliquot.core.errors import WeightsFileError, reading
from aliquot.tensor_io.header import TensorEntry, read_header
from aliquot.tensor_io.jsonfile import read_json
from aliquot.tensor_io.publish import is_plain_name

Shape = tuple[int, ...]
SHOWN = 5  # names in an error message
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class ByteMap:
    """Tensors by name, and the bytes before the first tensor of each file."""

    entries: Mapping[str, TensorEntry]
    header_bytes: Mapping[Path, int]

    @classmethod
    def of_directory(cls, directory: Path, stem: str = "model") -> ByteMap:
        """The tensors of `<stem>.safetensors`, or of the shards that `<stem>.safetensors.index.json` lists.

        Raises UserError: neither exists, a shard is absent or malformed, an indexed tensor is not in its shard, or
        both exist and do not hold the same weights.
        """
        single = directory / f"{stem}.safetensors"
        index = directory / f"{stem}.safetensors.index.json"
        if not single.exists() and not index.exists():
            raise WeightsFileError(_absent(directory, stem), directory)
        if not single.exists():
            return cls._of_index(index, _weight_map(index))
        header = read_header(single)
        found = cls(header.entries, {single: header.header_bytes})
        if index.exists():
            weight_map = _weight_map(index)
            shards = {str(name) for name in weight_map.values()} - {single.name}
            # An index whose shards have all been merged into one file is merely old.
            if any((directory / name).exists() for name in shards):
                found._check_same(cls._of_index(index, weight_map), single, index)
        return found

    def _check_same(self, other: ByteMap, single: Path, index: Path) -> None:
        for name in sorted({*self.entries, *other.entries}):
            one, another = self.entries.get(name), other.entries.get(name)
            if one is None or another is None or _sample(one) != _sample(another):
                raise WeightsFileError(
                    f"{single.name} and the shards of {index.name} are both here, and {ascii(name)[1:-1]} differs: "
                    f"remove the ones that are not this model; transformers reads {single.name}",
                    single.parent,
                )

    @classmethod
    def _of_index(cls, index: Path, weight_map: Mapping[str, Any]) -> ByteMap:
        headers = {}
        for name in sorted({str(file) for file in weight_map.values()}):
            if not is_plain_name(name) or not name.endswith(".safetensors"):
                raise WeightsFileError(f"{name!r} is not the name of a safetensors file in this directory", index)
            headers[name] = read_header(index.parent / name)
        absent = [tensor for tensor, file in weight_map.items() if tensor not in headers[str(file)].entries]
        if absent:
            raise WeightsFileError(f"not in the files that the index names: {listed(absent)}", index)
        entries = {tensor: headers[file].entries[tensor] for tensor, file in weight_map.items()}
        return cls(entries, {index.parent / name: header.header_bytes for name, header in headers.items()})


def _weight_map(index: Path) -> dict[str, Any]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsFileError("no weight_map", index)
    return weight_map


def _sample(entry: TensorEntry) -> tuple[Any, ...]:
    """What two tensors have in common that are the same: dtype, shape, their first and last bytes."""
    size_bytes = entry.numel * entry.itemsize
    with reading(entry.file), entry.file.open("rb") as file:
        file.seek(entry.offset)
        first = file.read(min(_SAMPLE_BYTES, size_bytes))
        file.seek(entry.offset + max(0, size_bytes - _SAMPLE_BYTES))
        return entry.dtype, entry.shape, first, file.read(min(_SAMPLE_BYTES, size_bytes))


def check_tensors(
    wanted: Sequence[tuple[str, Shape]], found: Mapping[str, TensorEntry], where: Path, extra: Iterable[str] = ()
) -> None:
    """Raise one UserError that lists all tensors missing from `found`, `extra`, or of the wrong shape or dtype."""
    shapes = dict(wanted)
    missing = [name for name in shapes if name not in found]
    wrong = [
        f"{name} is {list(entry.shape)} instead of {list(shapes[name])}"
        for name, entry in found.items()
        if name in shapes and entry.shape != shapes[name]
    ]
    odd = [f"{name} is {entry.dtype}" for name, entry in found.items() if not entry.dtype.is_floating_point]
    problems = {"missing": missing, "not of this model": list(extra), "of the wrong shape": wrong, "not weights": odd}
    told = [f"{label}: {listed(names)}" for label, names in problems.items() if names]
    if told:
        raise WeightsFileError("tensors do not fit the model; " + "; ".join(told), where)


def listed(names: Sequence[str]) -> str:
    """At most five names and how many more there are."""
    shown = ", ".join(ascii(name[:200])[1:-1] for name in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _absent(directory: Path, stem: str) -> str:
    if not directory.is_dir():
        return "no such directory"
    message = f"no {stem}.safetensors and no {stem}.safetensors.index.json here"
    if any(directory.glob("*.bin")):
        message += "; convert the .bin files first: from_pretrained(...), then save_pretrained(...) with transformers"
    return message
