"""JSON that somebody else wrote: a dict, or one `UserError`, whatever the bytes are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from aliquot.core.errors import WeightsFileError, reading
from aliquot.core.nesting import decode_json
from aliquot.core.textfile import LFS_POINTER, is_lfs_pointer, read_small_file


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises UserError."""
    return parse_json(read_small(path), path)


def read_small(path: Path) -> bytes:
    """As textfile.read_small_file. Raises UserError."""
    try:
        with reading(path):
            return read_small_file(path)
    except ValueError as error:
        raise WeightsFileError(str(error), path) from error


def parse_json(data: bytes, where: str | Path) -> dict[str, Any]:
    """A JSON object from UTF-8 `data`; a name that occurs twice in an object is an error. Raises UserError."""
    try:
        value = decode_json(data, object_pairs_hook=_unique)
    except ValueError as error:  # bad UTF-8, bad JSON, endless digits, endless nesting
        if is_lfs_pointer(data):
            raise WeightsFileError(LFS_POINTER, where) from error
        raise WeightsFileError(f"not valid JSON: {ascii(str(error))[1:200]}", where) from error
    if not isinstance(value, dict):
        raise WeightsFileError("not a JSON object", where)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice!r} occurs twice")
    return names
