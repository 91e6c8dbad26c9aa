"""How many machines a run takes: a number, or MIN:MAX, between which nodes may come and go while it lasts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from aliquot.config.section import Section

_RANGE = re.compile(r"([1-9][0-9]{0,5}):([1-9][0-9]{0,5})")


def _checked(text: str) -> str:
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError("give a number, or MIN:MAX for nodes that may come and go, for example 2:4")
    return text


NodeCount = Annotated[int, Field(gt=0, le=999_999)] | Annotated[str, AfterValidator(_checked)]


def may_change(nodes: int | str) -> bool:
    """Whether nodes may come and go."""
    return ":" in str(nodes)


class OnNodes(Section):
    """A section with a key `nodes`, which it declares itself, at its place among the others."""

    if TYPE_CHECKING:
        nodes: NodeCount

    @property
    def fewest_nodes(self) -> int:
        return int(str(self.nodes).partition(":")[0])

    @property
    def most_nodes(self) -> int:
        return int(str(self.nodes).rpartition(":")[2])

    @property
    def nodes_may_change(self) -> bool:
        return may_change(self.nodes)
