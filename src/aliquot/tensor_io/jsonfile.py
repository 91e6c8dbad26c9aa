"""Read a JSON object from an untrusted file. Any other content raises UserError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aliquot.core.decode import decode_json_object
from aliquot.core.errors import WeightsFileError, reading
from aliquot.core.small_files import read_small_file


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file `path`. Raises UserError."""
    return parse_json(read_small(path), path)


def read_small(path: Path) -> bytes:
    """Return the content of a small regular file (see `small_files.read_small_file`). Raises UserError."""
    try:
        with reading(path):
            return read_small_file(path)
    except ValueError as error:
        raise WeightsFileError(str(error), path) from error


def parse_json(data: bytes, where: str | Path) -> dict[str, Any]:
    """Parse a JSON object from UTF-8 `data`. Raises UserError, also if an object repeats a name.

    `where`: the path of the file, for the error message.
    """
    try:
        return decode_json_object(data, unique_names=True)
    except ValueError as error:  # bad UTF-8, bad JSON, too many digits, too deep nesting
        raise WeightsFileError(str(error), where) from error
