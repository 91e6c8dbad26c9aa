"""The byte map of a directory: where every tensor lies, from the safetensors headers and their index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aliquot.errors import WeightsFileError
from aliquot.ranges.header import TensorEntry, read_header
from aliquot.ranges.jsonfile import read_json
from aliquot.ranges.publish import is_plain_name

Shape = tuple[int, ...]
SHOWN = 5  # names in an error message


@dataclass(frozen=True)
class ByteMap:
    """Tensors by name, and the bytes before the first tensor of each file."""

    entries: Mapping[str, TensorEntry]
    header_bytes: Mapping[Path, int]

    @classmethod
    def of_directory(cls, directory: Path, stem: str = "model") -> ByteMap:
        """The tensors of `<stem>.safetensors`, or of the shards that `<stem>.safetensors.index.json` lists.

        Raises UserError: neither exists, a shard is absent or malformed, an indexed tensor is not in its shard.
        """
        single = directory / f"{stem}.safetensors"
        index = directory / f"{stem}.safetensors.index.json"
        if single.exists():
            header = read_header(single)
            return cls(header.entries, {single: header.header_bytes})
        if index.exists():
            return cls._of_index(index)
        raise WeightsFileError(_absent(directory, stem), directory)

    @classmethod
    def _of_index(cls, index: Path) -> ByteMap:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsFileError("no weight_map", index)
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
