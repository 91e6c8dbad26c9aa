"""The `launch` section: machines, ranks and timeouts; and the key `nodes`, which `cluster` has, too.

The number of nodes is a number, or MIN:MAX for an elastic run, whose nodes may come and go.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from aliquot.config.section import Section

_MAX_RANKS = 4096  # of a node: more processes than any machine has cores
_RANGE = re.compile(r"([1-9][0-9]{0,5}):([1-9][0-9]{0,5})")


def _check_range(text: str) -> str:
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError("give a number, or MIN:MAX for nodes that may come and go, for example 2:4")
    return text


NodeCount = Annotated[int, Field(gt=0, le=999_999)] | Annotated[str, AfterValidator(_check_range)]


def is_elastic(nodes: int | str) -> bool:
    """Return whether `nodes` is MIN:MAX, so that nodes may come and go during the run."""
    return ":" in str(nodes)


class SectionWithNodes(Section):
    """A section that declares a key `nodes`, at its place among its other keys."""

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


class LaunchSection(SectionWithNodes):
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees a GPU.")
    ranks: Annotated[int, Field(gt=0, le=_MAX_RANKS)] | Literal["auto"] = Field(
        "auto",
        description="Local ranks. auto: one a GPU; on CPU one a core up to 4 a NUMA node, then one every 4 cores, as"
        " memory (2 GiB a rank) and the micro-batches of train.global_batch_size allow; one a NUMA node without"
        " train.global_batch_size and with engines fsdp and deepspeed.",
    )
    threads_per_rank: PositiveInt | None = Field(None, description="Default: physical cores / local ranks.")
    nodes: NodeCount = Field(
        1,
        description="Machines; `aliquot train` is started on each of them. MIN:MAX, for example 2:4: an elastic run,"
        " whose nodes may come and go, and which needs no node_rank and no master.",
    )
    node_rank: NonNegativeInt = Field(0, description="The number of this node, from 0.")
    master_address: str = Field("127.0.0.1", description="The address of node 0.")
    master_port: int = Field(
        29500, ge=1, le=65535, description="A free port of node 0; a run on one machine takes any free port itself."
    )
    join_timeout_s: PositiveFloat = Field(
        900.0, le=1e9, description="Nodes and ranks wait this long for the others at start."
    )
    step_timeout_s: PositiveFloat = Field(
        1800.0,
        le=1e9,  # clocks of the system take no 300 years
        description="The run ends when a rank makes no progress in training for this long. In preparation and export"
        " it also ends when a node is not heard of for this long, or when no rank computes, reads or writes.",
    )
