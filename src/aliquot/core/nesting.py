"""A limit on how deeply input may nest, counted in the input itself.

The interpreter's recursion limit must not decide: libraries raise it (torch.compile does), so that the same file would
be refused in one process, read in the next, and overflow the stack in a third.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate, chain
from typing import Any

import yaml

DEEPEST = 100  # levels; configurations and records have at most 30, and recursion takes a few frames a level

_COLLECTIONS = (dict, list, tuple, yaml.CollectionNode)
_YAML_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_JSON_STRING = re.compile(r'"(?:[^"\\]++|\\.|\\\Z)*+(?:"|\Z)', re.DOTALL)  # the last one may be cut short
_NO_BRACKET = re.compile(r"[^\[\]{}]+")


class TooDeepError(ValueError):
    """Lists and mappings nest more deeply than `DEEPEST`."""

    def __init__(self) -> None:
        super().__init__(f"lists and mappings nest more than {DEEPEST} levels deep")


def decode_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text; `options` are those of `json.loads`.

    Raises:
        ValueError: the text is not UTF-8, not JSON, has a number of thousands of digits, or nests too deeply.
    """
    text = text if isinstance(text, str) else text.decode("utf-8-sig")
    check_json_depth(text)
    return json.loads(text, **options)


def check_json_depth(text: str) -> None:
    """Raise TooDeepError before a parser recurses into `text`."""
    if text.count("[") + text.count("{") > DEEPEST:  # else the text cannot be too deep, and nothing else is counted
        brackets = _NO_BRACKET.sub("", _JSON_STRING.sub("", text))
        if max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0) > DEEPEST:
            raise TooDeepError


def check_yaml_depth(text: str) -> None:
    """Raise TooDeepError before a composer recurses into `text`; leave a syntax error to that composer.

    Aliases can nest more deeply than the text does: `check_depth` counts in the composed nodes or the loaded value.
    """
    depth = 0
    with suppress(yaml.YAMLError):
        for event in yaml.parse(text, Loader=_YAML_PARSER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise TooDeepError


def check_depth(value: object) -> None:
    """Raise TooDeepError if dicts and lists in `value`, or collection nodes of YAML, nest too deeply or in a circle."""
    level = [value]
    for _ in range(DEEPEST + 1):  # the first level is `value`, even if it holds nothing
        level = [item for item in level if isinstance(item, _COLLECTIONS)]
        if not level:
            return
        inner = {id(item): item for collection in level for item in _items(collection)}  # each alias once
        level = list(inner.values())
    raise TooDeepError


def _items(collection: Any) -> Iterable[object]:
    if isinstance(collection, yaml.MappingNode):
        return chain.from_iterable(collection.value)
    if isinstance(collection, dict):
        return chain(collection.values())
    return chain(collection.value if isinstance(collection, yaml.SequenceNode) else collection)
