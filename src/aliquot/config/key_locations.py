"""Find out where the keys of a config were written (file and line), for errors that name a key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import yaml

from aliquot.core.errors import UserError

Location = str  # "file:line", or "command line"
KeyPath = tuple[str, ...]

_DOTTED_KEY = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")


def key_lines(node: yaml.Node | None, keys: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    """Yield the path and the line of every key and list item below a YAML node; `keys` is the path of the node."""
    if isinstance(node, yaml.SequenceNode):
        children = [(str(index), item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    else:
        return
    for name, place, value in children:
        path = (*keys, name)
        yield path, place.start_mark.line + 1
        yield from key_lines(value, path)


def location_of_first_key(text: str, locations: Mapping[KeyPath, Location]) -> Location | None:
    """Return the location of the first dotted key in `text` for which `locations` has a location, or None."""
    candidates = (locations.get(tuple(key.split("."))) for key in _DOTTED_KEY.findall(text))
    return next((location for location in candidates if location is not None), None)


@contextmanager
def locate_errors(locations: Mapping[KeyPath, Location]) -> Iterator[None]:
    """Prefix each UserError that begins with a dotted key by the location where the key was written."""
    try:
        yield
    except UserError as error:
        key = _DOTTED_KEY.match(str(error))
        location = locations.get(tuple(key[0].split("."))) if key is not None else None
        if location is not None:
            error.args = (f"{location}: {error}",)
        raise
