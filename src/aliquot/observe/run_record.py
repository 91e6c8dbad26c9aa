"""What a run records of itself before its first step: in ledger.json and in the first line of events.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunRecord:
    """The machine, the model and the plan of a run. The names of the fields are the keys in the files."""

    placement: str  # of the ranks on cores, for people
    machine: Mapping[str, Any]  # machine/facts.py
    ceiling_flops_per_s: float  # of all ranks together in plain matrix products
    ceiling_is_sure: bool  # False: the machine had other work when the ceiling was measured
    resumed_from: str | None  # the directory of a checkpoint
    model: str
    parameters: int
    learned: int  # parameters that training changes
    engine: str
    plan: Mapping[str, Any]  # as `aliquot plan --json` prints it; empty if there is none

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))
