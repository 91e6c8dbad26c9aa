"""Of all the ranks that died, which one failed first, and how to say so in a line or two."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from aliquot.distributed.bounded_call import within_a_moment
from aliquot.distributed.rank_errors import RankError, log_file


class Failure(Protocol):
    """What torch's elastic launcher knows of a dead process."""

    @property
    def exitcode(self) -> int: ...  # negative: the signal

    @property
    def timestamp(self) -> int: ...  # seconds since the epoch, rounded down


def explain(
    failures: Mapping[int, Failure], words: Sequence[RankError], log_directory: Path
) -> tuple[list[str], int, str]:
    """Lines for the person about the failure that caused the others, the exit code for the launcher, the kind of error.

    `failures` by global rank: torch may tell only of the first to exit, so where that is an echo the cause is looked
    for in `words`, what all ranks of this launcher have said in this order. The code is 2 where the input was bad,
    143 where all was saved because another node was told to stop, else 1; the kind one of rank_errors.Kind, or "killed"
    where a rank has died without a word.
    """
    recorded: dict[int, RankError | None] = dict.fromkeys(failures) | {each.rank: each for each in words}
    rank = min(failures, key=lambda rank: _order(failures[rank], recorded[rank], words))
    error = recorded[rank]
    lines = [f"aliquot: {_describe(rank, failures[rank], error)}"]
    if _order(failures[rank], error, words)[0] > 0:
        causes = (each for each in words if each.kind != "peer_lost" and each.exit_code <= 2)
        if (cause := next(causes, None)) is not None:
            rank, error, lines = cause.rank, cause, [f"aliquot: {cause.line}"]
    if error is not None and error.exit_code != 1:
        return lines, error.exit_code, error.kind
    more = f"  more in {log_file(log_directory, rank)}"
    within_a_moment(lambda: lines.append(more) if log_file(log_directory, rank).exists() else None)
    return lines, 1, "killed" if error is None else error.kind


def explain_stop(number: signal.Signals, words: Sequence[RankError]) -> tuple[list[str], int]:
    """Lines for the person and the exit code where this launcher was told to stop, and its ranks with it.

    128 + signal, unless a rank has failed at it, to save for example.
    """
    stopped = 128 + number
    failed = [error for error in words if error.exit_code != stopped and error.kind != "peer_lost"]
    obeyed = [error for error in words if error.exit_code == stopped]
    if not obeyed:
        failed = failed or list(words)  # a lost rank that nobody accounts for: it did not save
    for error in (failed or obeyed)[:1]:
        return [f"aliquot: {error.line}"], error.exit_code if failed else stopped
    return [f"aliquot: stopped by {number.name}"], stopped


def _order(failure: Failure, error: RankError | None, words: Sequence[RankError]) -> tuple[int, float]:
    """Causes before echoes, then as they were told of: clocks may be set meanwhile."""
    if error is not None:
        return (2 if error.kind == "peer_lost" else 0), words.index(error)
    between = sum(each.time < failure.timestamp for each in words) - 0.5
    if failure.exitcode == -signal.SIGTERM:
        return 3, between  # the launcher's own, to the ranks that were left
    if failure.exitcode == -signal.SIGABRT:
        return 1, between  # may be torch giving up on a lost connection
    return 0, between


def _describe(rank: int, failure: Failure, error: RankError | None) -> str:
    if error is not None:
        return error.line
    if failure.exitcode >= 0:
        return f"rank {rank} ended with exit code {failure.exitcode} [crash]"
    killer = -failure.exitcode
    name = signal.Signals(killer).name if killer in set(signal.Signals) else f"signal {killer}"
    return f"rank {rank} was killed by {name}{' (out of memory?)' if killer == signal.SIGKILL else ''} [killed]"
