"""What a check looks at, and what it says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from aliquot.machine.cpu import CpuFacts, read_cpu

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One check's answer. `id` is stable: docs/troubleshooting explains it."""

    id: str
    title: str
    level: Level
    found: str  # what is so
    meaning: str  # for training
    fix: str = ""  # empty where there is nothing to do

    def text(self) -> str:
        """As a person reads it: what is so, what it means, what to do."""
        lines = [f"{self.level:<8} {self.id}: {self.found}", f"{'':<9}{self.meaning}"]
        return "\n".join([*lines, f"{'':<9}fix: {self.fix}"] if self.fix else lines)


@dataclass(frozen=True)
class Subject:
    """A machine, as one process may use it. Files are read under `root`; all that is no file is this machine's own."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    allowed: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    run_directory: Path = Path("runs")
    peers: tuple[str, ...] = ()  # HOST or HOST:PORT of other nodes
    port: int = 29500

    @cached_property
    def cpu(self) -> CpuFacts:
        return read_cpu(self.root, self.allowed)
