"""What a check of `aliquot doctor` examines (Subject), and its result (Finding)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Literal, NamedTuple, ParamSpec

from aliquot.core.number_format import count_of
from aliquot.machine.cpu import CpuFacts, read_cpu

Level = Literal["ok", "warning", "problem"]
P = ParamSpec("P")


@dataclass(frozen=True)
class Finding:
    """The result of one check. docs/guides/troubleshooting.md explains every `id`; ids do not change."""

    id: str = field(default="", kw_only=True)  # `check` sets id and title
    title: str = field(default="", kw_only=True)
    level: Level
    found: str  # the observed state
    meaning: str  # the consequence for training
    fix: str = ""  # empty if no fix is needed

    def text(self) -> str:
        """Return the finding as lines for a person: state, consequence, fix."""
        lines = [f"{self.level:<8} {self.id}: {self.found}", f"{'':<9}{self.meaning}"]
        return "\n".join([*lines, f"{'':<9}fix: {self.fix}"] if self.fix else lines)


class Case(NamedTuple):
    """A row in the table of a check: the finding to return if the case applies."""

    applies: object
    level: Level
    meaning: str
    fix: str = ""
    state: str | None = None  # None: the state that the check has observed


def conclude(observed: str, *cases: Case, ok: str) -> Finding:
    """Return the finding of the first case that applies to the state `observed`. If none does, all is `ok`."""
    case = next((case for case in cases if case.applies), Case(True, "ok", ok))
    return Finding(case.level, observed if case.state is None else case.state, case.meaning, case.fix)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line for a person: which findings to read again."""
    ids = {level: [finding.id for finding in findings if finding.level == level] for level in ("problem", "warning")}
    return "; ".join(
        f"{count_of(len(names), level)}{': ' if names else ''}{', '.join(names)}" for level, names in ids.items()
    )


def check(id: str, title: str) -> Callable[[Callable[P, Finding]], Callable[P, Finding]]:
    """Decorate a function that returns a finding, so that the finding has this id and title."""

    def decorate(judge: Callable[P, Finding]) -> Callable[P, Finding]:
        return wraps(judge)(lambda *args, **options: replace(judge(*args, **options), id=id, title=title))

    return decorate


@dataclass(frozen=True)
class Subject:
    """The machine to examine, as this process may use it. Checks read files below `root`, other facts directly."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    allowed: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    run_directory: Path = Path("runs")
    peers: tuple[str, ...] = ()  # other nodes, as HOST or HOST:PORT
    port: int = 29500

    @cached_property
    def cpu(self) -> CpuFacts:
        return read_cpu(self.root, self.allowed)
