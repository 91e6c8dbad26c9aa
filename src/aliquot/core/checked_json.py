"""JSON files that aliquot itself writes and reads again: each holds a checksum of its fields, and none is trusted."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aliquot.core.decode import decode_json_object
from aliquot.core.small_files import publish_text, read_small_file

_CHECKSUM = "crc32"


def with_checksum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON object, and a checksum of them."""
    return {**fields, _CHECKSUM: _crc32(fields)}


def has_checksum(fields: dict[str, Any]) -> bool:
    """Remove the checksum from the fields of a JSON object, and return whether it fits."""
    return bool(fields.pop(_CHECKSUM, None) == _crc32(fields))


def publish_checked_json(path: Path, fields: Mapping[str, Any], indent: int | None = None) -> None:
    """Replace `path` by a file with `fields` atomically. Raises OSError."""
    publish_text(path, json.dumps(with_checksum(fields), indent=indent))


def read_checked_json(path: Path) -> dict[str, Any] | None:
    """Return the fields that `publish_checked_json` wrote; None for any other file, and for one that cannot be read."""
    try:
        fields = decode_json_object(read_small_file(path, follow_links=False))
    except (OSError, ValueError):
        return None
    return fields if has_checksum(fields) else None


def _crc32(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
