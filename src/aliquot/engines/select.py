"""Which engine runs: the one place that knows them all."""

from __future__ import annotations

from typing import Literal

from aliquot.engines.base import Engine


def engine_class(name: Literal["auto", "fsdp"]) -> tuple[str, type[Engine]]:
    """The name and class of the engine for `shard.engine`; imports only the one that is used."""
    from aliquot.engines.fsdp import FsdpEngine

    return "fsdp", FsdpEngine
