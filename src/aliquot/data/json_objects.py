"""JSON objects as people write them: over several lines, or with a key that stands twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from aliquot.core.decode import decode_json
from aliquot.core.errors import DataError
from aliquot.data.opened import opened

LONGEST_BYTES = 64 << 20  # of an object over several lines, which is read at once


def whole_object(path: Path, start: bytes) -> tuple[dict[str, Any], str] | None:
    """The JSON object that is all of a file, over several lines, and what is to be said of a key that stands twice;
    None: the first line is a record, or nothing is one.

    Raises DataError for several objects over several lines each.
    """
    line, ended, _ = start.partition(b"\n")
    if not ended or _is_json(line):
        return None
    with opened(path) as (file, _):
        data = file.read(LONGEST_BYTES + 1)
    keys = UniqueKeys()
    try:
        value = decode_json(data, object_pairs_hook=keys)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise DataError(
                "JSON objects over several lines: write one record a line (jq -c . FILE does)", path
            ) from error
        return None
    except ValueError:
        return None
    return (value, keys.twice) if isinstance(value, dict) else None


def _is_json(line: bytes) -> bool:
    try:
        decode_json(line)
    except ValueError:
        return False
    return True


class TwiceError(Exception):
    """A key that stands twice in one object: Python would keep the last one."""


class UniqueKeys:
    """Make the objects of a JSON text, and remember, or `refuse` with TwiceError, a key that stands twice in one."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse, self.twice = refuse, ""

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            self.twice = stands_twice([key for key, _ in pairs], "key")
            if self.refuse:
                raise TwiceError(self.twice)
        return record


def stands_twice(names: list[str], what: str) -> str:
    """What to say of names of which one stands twice; empty where each stands once."""
    name, times = Counter(names).most_common(1)[0] if names else ("", 1)
    return f"the {what} {name!r} stands {times} times: which one is meant? Rename or remove the others" * (times > 1)
