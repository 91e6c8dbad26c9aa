"""What happened to a run besides its curve: one JSON object an event in events.jsonl, never removed.

start, resume: what the run is made of, at each attempt · checkpoint: `seconds` until complete, `stall_s` that training
stood still for it · warning · slow_ranks · stopped_early · round: which nodes go on from
where, by their leader · and how it ended: end, stopped (by a signal), failed, with
the speed over all steps of the attempt but its first. A run that was killed has no last word.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from aliquot.errors import writing

ENDS = ("end", "stopped", "failed")


class Events:
    """Appends to events.jsonl on the rank that writes; elsewhere nothing. The file begins with the first event."""

    def __init__(self, path: Path, enabled: bool) -> None:
        self._path = path
        self._enabled = enabled

    def write(self, event: str, step: int, **fields: Any) -> None:
        """Raises UserError where the disk is full."""
        if not self._enabled:
            return
        line = json.dumps({"event": event, "step": step, "time": time.time(), **fields})
        # An attempt that was killed may have left half a line: the next one starts on a line of its own.
        with writing(self._path):
            torn = self._path.exists() and self._path.stat().st_size > 0 and not _ends_a_line(self._path)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" * torn + line + "\n")


def command_line(argv: list[str] | None = None) -> str:
    """How this process was started, to be typed again: ranks are told the arguments that their launcher had."""
    program, *arguments = sys.argv if argv is None else argv
    if Path(program).name in ("aliquot", "__main__.py"):
        return shlex.join(["aliquot", *arguments])
    return shlex.join(["python", program, *arguments])


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
