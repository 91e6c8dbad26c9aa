"""The events of a run: one JSON object per line of events.jsonl. Lines are never removed.

- start, resume: model, data (a summary and the first samples) and machine of each attempt
- checkpoint: the `seconds` of a save, and the part of them for which training waited (`stall_s`)
- warning, slow_ranks, stopped_early: `text` describes the event
- round: the nodes that continue an elastic run and their step, written by the leader node
- end, stopped (by a signal), failed: the speed over all steps of the attempt except the first

A run that was killed has no final event.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aliquot.core.errors import writing
from aliquot.core.small_files import open_unlinked

ENDS = ("end", "stopped", "failed")


@dataclass(frozen=True)
class RunRecord:
    """Facts about a run that ledger.json and the start event in events.jsonl record before the first step.

    The names of the fields are the keys in both files.
    """

    placement: str  # of ranks on cores; text for people
    machine: Mapping[str, Any]  # facts of machine/facts.py
    ceiling_flops_per_s: float  # of all ranks together in plain matrix products
    ceiling_is_sure: bool  # False: the machine had other work when the ceiling was measured
    resumed_from: str | None  # the directory of a checkpoint
    model: str
    parameters: int
    learned: int  # parameters that training changes
    engine: str
    plan: Mapping[str, Any]  # in the form of `aliquot plan --json`; empty without a plan
    # Lines for the report: `summary` and first `samples` of the data. Only events.jsonl has them, because ledger.json
    # goes to dashboards.
    data: Mapping[str, Sequence[str]]

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "data"}


class Events:
    """Appends events to events.jsonl if `enabled`, as on rank 0. The first event creates the file.

    The file stays open until `close`, so that the last event is written to this file even if somebody replaced the run
    directory.
    """

    def __init__(self, path: Path, enabled: bool) -> None:
        self._path = path
        self._enabled = enabled
        self._file: IO[Any] | None = None

    def write(self, event: str, step: int, **fields: Any) -> None:
        """Append an event. Raises UserError if the disk is full."""
        if not self._enabled:
            return
        line = json.dumps({"event": event, "step": step, "time": time.time(), **fields})
        with writing(self._path):
            if self._file is None:
                self._file = open_unlinked(self._path, "ab+", buffering=0)
            # A killed attempt or a full disk may have left an incomplete line. Then begin the event on a new line.
            descriptor = self._file.fileno()
            size = os.fstat(descriptor).st_size
            is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            rest = ("\n" * is_torn + line + "\n").encode()
            while rest:
                rest = rest[os.write(descriptor, rest) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def command_line(argv: list[str] | None = None) -> str:
    """Return the shell command that started this run. A rank has the same arguments as its launcher."""
    program, *arguments = sys.argv if argv is None else argv
    is_command = Path(program).name in ("aliquot", "__main__.py")
    return shlex.join([*(["aliquot"] if is_command else ["python", program]), *arguments])
