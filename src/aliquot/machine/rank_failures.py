"""Of all the ranks that died, which one failed first, and how to say so in a line or two."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from aliquot.machine.rank_errors import RankError, log_file, read_error


class Failure(Protocol):
    """What torch's elastic launcher knows of a dead process."""

    @property
    def exitcode(self) -> int: ...  # negative: the signal

    @property
    def timestamp(self) -> int: ...  # seconds since the epoch, rounded down


def explain(failures: Mapping[int, Failure], log_directory: Path) -> tuple[list[str], int]:
    """Lines for the person about the failure that caused the others, and the exit code for the launcher.

    `failures` by global rank. 2 where the input was bad, else 1.
    """
    recorded = {rank: read_error(log_directory, rank) for rank in failures}
    rank = min(failures, key=lambda rank: _order(failures[rank], recorded[rank]))
    lines, code = _describe(rank, failures[rank], recorded[rank])
    if code != 2 and log_file(log_directory, rank).exists():
        lines.append(f"  more in {log_file(log_directory, rank)}")
    return lines, code


def _order(failure: Failure, error: RankError | None) -> tuple[int, float]:
    """Causes before echoes, then by time."""
    if error is not None:
        return (2 if error.kind == "peer_lost" else 0), error.time
    if failure.exitcode == -signal.SIGTERM:
        return 3, failure.timestamp  # the launcher's own, to the ranks that were left
    if failure.exitcode == -signal.SIGABRT:
        return 1, failure.timestamp  # may be torch giving up on a lost connection
    return 0, failure.timestamp


def _describe(rank: int, failure: Failure, error: RankError | None) -> tuple[list[str], int]:
    if error is None:
        if failure.exitcode >= 0:
            return [f"aliquot: rank {rank} ended with exit code {failure.exitcode}"], failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return [f"aliquot: rank {rank} was killed by {name}{hint}"], 1
    message = error.message.strip()
    if error.kind == "user":
        return [f"aliquot: {message}"], 2
    if error.kind == "peer_lost":
        return [f"aliquot: rank {rank} lost its connection to a rank on another node, whose output says why"], 1
    prefix = f"rank {rank}" if error.kind == "training" else f"rank {rank} failed"
    return [f"aliquot: {prefix}: {message.partition(chr(10))[0]}"], 1
