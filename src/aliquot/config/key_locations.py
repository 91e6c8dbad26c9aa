"""Where the keys of a configuration were written, for errors that name one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aliquot.core.errors import UserError

Location = str  # "file:line", or "command line"
Keys = tuple[str, ...]

_KEY = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")


def place_of_first(text: str, places: Mapping[Keys, Location]) -> Location | None:
    """Where the first key in `text` was written that was written at all."""
    found = (places.get(tuple(key.split("."))) for key in _KEY.findall(text))
    return next((place for place in found if place is not None), None)


@contextmanager
def naming_places(places: Mapping[Keys, Location]) -> Iterator[None]:
    """An error that begins with a key, as those about its value do, says where that was written."""
    try:
        yield
    except UserError as error:
        key = _KEY.match(str(error))
        place = places.get(tuple(key[0].split("."))) if key is not None else None
        if place is not None:
            error.args = (f"{place}: {error}",)
        raise
