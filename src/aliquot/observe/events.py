"""What happened to a run besides its curve: one JSON object an event in events.jsonl, never removed.

start, resume: what the run is made of, at each attempt · checkpoint: `seconds` until complete, `stall_s` that training
stood still for it · warning · slow_ranks · stopped_early · round: which nodes go on from
where, by their leader · and how it ended: end, stopped (by a signal), failed, with
the speed over all steps of the attempt but its first. A run that was killed has no last word.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import IO, Any

from aliquot.core.errors import writing
from aliquot.core.small_files import open_unlinked

ENDS = ("end", "stopped", "failed")


class Events:
    """Appends to events.jsonl on the rank that writes; elsewhere nothing. The file begins with the first event.

    The file stays open until `close`: the last event belongs to this run, whatever its path leads to by then.
    """

    def __init__(self, path: Path, enabled: bool) -> None:
        self._path = path
        self._enabled = enabled
        self._file: IO[Any] | None = None

    def write(self, event: str, step: int, **fields: Any) -> None:
        """Raises UserError where the disk is full."""
        if not self._enabled:
            return
        line = json.dumps({"event": event, "step": step, "time": time.time(), **fields})
        with writing(self._path):
            if self._file is None:
                self._file = open_unlinked(self._path, "ab+", buffering=0)
            # A killed attempt or a full disk may have left half a line: the next event starts on a line of its own.
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
    """How this process was started, to be typed again: ranks are told the arguments that their launcher had."""
    program, *arguments = sys.argv if argv is None else argv
    if Path(program).name in ("aliquot", "__main__.py"):
        return shlex.join(["aliquot", *arguments])
    return shlex.join(["python", program, *arguments])
