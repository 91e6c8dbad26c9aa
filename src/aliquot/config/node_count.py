"""How many machines a run takes: a number, or MIN:MAX, between which nodes may come and go while it lasts."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, PositiveInt

_RANGE = re.compile(r"([1-9][0-9]{0,5}):([1-9][0-9]{0,5})")


def _checked(text: str) -> str:
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError("give a number, or MIN:MAX for nodes that may come and go, for example 2:4")
    return text


NodeCount = PositiveInt | Annotated[str, AfterValidator(_checked)]


def fewest(nodes: int | str) -> int:
    return int(str(nodes).partition(":")[0])


def most(nodes: int | str) -> int:
    return int(str(nodes).rpartition(":")[2])


def may_change(nodes: int | str) -> bool:
    """Whether nodes may come and go."""
    return ":" in str(nodes)
