"""The `launch` section: on which machines, in how many ranks, and how long they wait for each other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from aliquot.config.section import Section

_RANGE = re.compile(r"([1-9][0-9]{0,5}):([1-9][0-9]{0,5})")


def _checked(text: str) -> str:
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError("give a number, or MIN:MAX for nodes that may come and go, for example 2:4")
    return text


NodeCount = Annotated[int, Field(gt=0, le=999_999)] | Annotated[str, AfterValidator(_checked)]


def is_elastic(nodes: int | str) -> bool:
    """Whether nodes may come and go."""
    return ":" in str(nodes)


class SectionWithNodes(Section):
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
    def is_elastic(self) -> bool:
        return is_elastic(self.nodes)


_MOST_RANKS = 4096  # of a node: more processes than any has cores


class LaunchSection(SectionWithNodes):
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees a GPU.")
    ranks: Annotated[int, Field(gt=0, le=_MOST_RANKS)] | Literal["auto"] = Field(
        "auto",
        description="Local ranks. auto: one a GPU; on CPU one a core up to 4 a NUMA node, then one every 4 cores, as"
        " memory (2 GiB a rank) and the micro-batches of train.global_batch_size allow; one a NUMA node without"
        " train.global_batch_size and with the engines that gather.",
    )
    threads_per_rank: PositiveInt | None = Field(None, description="Default: physical cores / local ranks.")
    nodes: NodeCount = Field(
        1,
        description="Machines; `aliquot train` is started on each. MIN:MAX, for example 2:4: they may come and go, and"
        " need no node_rank and no master.",
    )
    node_rank: NonNegativeInt = Field(0, description="Which of them this one is.")
    master_address: str = Field("127.0.0.1", description="Where node 0 is reached.")
    master_port: int = Field(29500, ge=1, le=65535, description="A free port of node 0; one machine takes any itself.")
    join_timeout_s: PositiveFloat = Field(
        900.0, le=1e9, description="Nodes and ranks wait this long for each other at start."
    )
    step_timeout_s: PositiveFloat = Field(
        1800.0,
        le=1e9,  # clocks of the system take no 300 years
        description="A rank that makes no progress in training this long ends the run; in preparation and export too a"
        " node that is not heard of does, or that no rank computes, reads or writes.",
    )
