"""Map a directory of safetensors files: the file, offset, dtype and shape of every tensor, read from the headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aliquot.core.decode import read_json
from aliquot.core.errors import WeightsFileError, reading
from aliquot.core.small_files import open_regular
from aliquot.tensor_io.header import TensorEntry, read_header
from aliquot.tensor_io.publish import is_plain_name

Shape = tuple[int, ...]
MAX_SHOWN = 5  # names in an error message
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class ByteMap:
    """The location of each tensor by its name, and the header length of each file."""

    entries: Mapping[str, TensorEntry]
    header_bytes: Mapping[Path, int]

    @classmethod
    def from_directory(cls, directory: Path, stem: str = "model") -> ByteMap:
        """Map `<stem>.safetensors`, or the shards that `<stem>.safetensors.index.json` lists.

        Raises UserError if files are missing or malformed, or if both exist and differ.
        """
        single, index = directory / f"{stem}.safetensors", directory / f"{stem}.safetensors.index.json"
        if not single.exists() and not index.exists():
            raise WeightsFileError(_absent(directory, stem), directory)
        if not single.exists():
            return cls._from_index(index, _weight_map(index))
        header = read_header(single)
        byte_map = cls(header.entries, {single: header.header_bytes})
        if index.exists():
            weight_map = _weight_map(index)
            shards = {str(name) for name in weight_map.values()} - {single.name}
            # An index without any of its shards is a harmless remainder: the shards have been merged into one file.
            if any((directory / name).exists() for name in shards):
                byte_map._check_same(cls._from_index(index, weight_map), single, index)
        return byte_map

    def _check_same(self, shards: ByteMap, single: Path, index: Path) -> None:
        for name in sorted({*self.entries, *shards.entries}):
            in_single, in_shards = self.entries.get(name), shards.entries.get(name)
            if in_single is None or in_shards is None or _sample(in_single) != _sample(in_shards):
                raise WeightsFileError(
                    f"{single.name} and the shards of {index.name} are both here, and {ascii(name)[1:-1]} differs: "
                    f"remove the ones that are not this model; transformers reads {single.name}",
                    single.parent,
                )

    @classmethod
    def _from_index(cls, index: Path, weight_map: Mapping[str, Any]) -> ByteMap:
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
    """Return (dtype, shape, first bytes, last bytes) of a tensor, by which copies in different files are compared."""
    size_bytes = entry.numel * entry.itemsize
    with reading(entry.file), open_regular(entry.file) as file:
        file.seek(entry.offset)
        first = file.read(min(_SAMPLE_BYTES, size_bytes))
        file.seek(entry.offset + max(0, size_bytes - _SAMPLE_BYTES))
        return entry.dtype, entry.shape, first, file.read(min(_SAMPLE_BYTES, size_bytes))


def check_tensors(
    expected: Sequence[tuple[str, Shape]], entries: Mapping[str, TensorEntry], where: Path, extra: Iterable[str] = ()
) -> None:
    """Compare the tensors of a model with those of its files.

    Raises one UserError that lists missing tensors, `extra` tensors, and tensors of the wrong shape or dtype. `where`:
    the directory, for the error message.
    """
    shapes = dict(expected)
    missing = [name for name in shapes if name not in entries]
    wrong = [
        f"{name} is {list(entry.shape)} instead of {list(shapes[name])}"
        for name, entry in entries.items()
        if name in shapes and entry.shape != shapes[name]
    ]
    odd = [f"{name} is {entry.dtype}" for name, entry in entries.items() if not entry.dtype.is_floating_point]
    problems = {"missing": missing, "not of this model": list(extra), "of the wrong shape": wrong, "not weights": odd}
    messages = [f"{label}: {listed(names)}" for label, names in problems.items() if names]
    if messages:
        raise WeightsFileError("tensors do not fit the model; " + "; ".join(messages), where)


def listed(names: Sequence[str]) -> str:
    """Return the first five names and the number of further names, as text for an error message."""
    shown = ", ".join(ascii(name[:200])[1:-1] for name in names[:MAX_SHOWN])
    return shown if len(names) <= MAX_SHOWN else f"{shown} and {len(names) - MAX_SHOWN} more"


def _absent(directory: Path, stem: str) -> str:
    if not directory.is_dir():
        return "no such directory"
    message = f"no {stem}.safetensors and no {stem}.safetensors.index.json here"
    if any(directory.glob("*.bin")):
        message += "; convert the .bin files first: from_pretrained(...), then save_pretrained(...) with transformers"
    return message + scratch_advice(directory)


def scratch_advice(directory: Path) -> str:
    """Return the setting for training from scratch if `directory` has the config.json of a model, but no weights."""
    if not (directory / "config.json").is_file() or any(directory.glob("*.safetensors*")):
        return ""
    return f". To train from scratch, write model.config: {directory}/config.json instead of model.path"
