"""Find out where the keys of a config were written (file and line), for errors that name a key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import yaml

from aliquot.core.errors import UserError

Location = str  # "file:line", or OVERRIDE and the override
KeyPath = tuple[str, ...]

OVERRIDE = "override "
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


def locate_contradiction(
    message: str, locations: Mapping[KeyPath, Location], section: KeyPath, place: Location
) -> tuple[Location, str]:
    """Return the place of an error about several keys of a config, and the message with a second place if it has one.

    The place is that of an override, because the file alone may be consistent, or else of the first key in `message`.

    Args:
        message: an error that names keys in the dotted form, or no keys.
        section: the section of the keys if `message` names none.
        place: the place to return if no key has a location.
    """
    named = [tuple(key.split(".")) for key in _DOTTED_KEY.findall(message)]
    keys = [key for key in named if key in locations]
    if not named:
        keys = [key for key in locations if key[: len(section)] == section and len(key) > len(section) > 0]
    override = next((locations[key] for key in keys if locations[key].startswith(OVERRIDE)), None)
    if override is None:
        return (locations[keys[0]] if named and keys else place), message
    other = next((key for key in keys if not locations[key].startswith(OVERRIDE)), None) if named else None
    return override, message + (f"; {locations[other]} sets {'.'.join(other)}" if other is not None else "")


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
