"""Record the error that ended each rank, and choose the one error that the user sees.

When one rank dies, its peers die of the lost connection a moment later. So each rank records its error with a kind; the
kind `peer_lost` marks errors that only follow from the error of another rank. The launcher collects the errors of its
ranks in a memfd, which neither a full disk nor another run can take away. A copy of each error is stored beside the
rank's log for users and reports.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from aliquot.core.errors import DivergedError, SelfTestError, TrainingError, UserError, printable, resource_error
from aliquot.core.small_files import open_unlinked, publish_text

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

LOG_DIRECTORY = "ALIQUOT_LOG_DIRECTORY"  # set in the ranks of aliquot's launcher only, not under torchrun
ERROR_LOG = "ALIQUOT_LAST_WORDS"  # the path of the launcher's ErrorLog

Kind = Literal["user", "training", "crash", "peer_lost"]
# What follows a round of an elastic run: its end, or the next round, after newcomers were sent away or of all nodes.
Verdict = Literal["finish", "end", "send away", "retry"]

T = TypeVar("T")
_BOUNDED_CALL_S = 3.0
_RECURRING = (DivergedError.id, SelfTestError.id)  # errors that recur with the same input and state
_CONNECTION_ERRORS = {"DistNetworkError", "DistStoreError", "DistBackendError"}
_CONNECTION_WORDS = (
    "gloo/transport", "connectFullMesh", "Connection closed by peer", "Connection reset by peer", "Broken pipe",
    "Timed out waiting",
)  # fmt: skip
_GLOO_PEER = re.compile(r"gloo/transport.* \[([^\[\]]+)\]:\d")


@dataclass(frozen=True)
class RankError:
    """The error that ended one rank."""

    rank: int
    kind: Kind
    message: str
    traceback: str
    time: float  # seconds since the epoch
    exit_code: int = 1
    id: str = ""  # of a UserError

    @property
    def line(self) -> str:
        """The error as one line, for a console that several ranks may share."""
        first = printable(self.message.strip().partition("\n")[0])
        if self.kind == "user":
            return first
        if self.kind == "training":
            return f"rank {self.rank}: {first}"
        if self.kind == "peer_lost" and (peer := _GLOO_PEER.search(first)) is not None:
            return f"rank {self.rank} lost the connection to a rank at {peer[1]}, which may say why [peer-lost]"
        if self.kind == "peer_lost":
            return f"rank {self.rank} lost the connection to another rank, which may say why: {first} [peer-lost]"
        return f"rank {self.rank} failed: {first} [crash]"


@dataclass(frozen=True)
class Ended:
    """How the ranks of a node ended."""

    code: int  # 0, 1, 2 for bad input, or 128 + signal if all ranks saved because a node received a stop signal
    lines: tuple[str, ...] = ()  # messages for the console
    kind: str = "done"  # otherwise the kind of the first rank error, or "killed" if that rank reported no error,
    # or "stopped" if this launcher itself received a stop signal
    id: str = ""  # of the UserError that ended the first rank


class ErrorLog:
    """The errors of the ranks of one launcher, in a memfd that exists as long as the launcher lives."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("aliquot-last-words")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> list[RankError]:
        """Return the errors in the order in which ranks have written them."""
        text = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).decode()
        return [RankError(**json.loads(line)) for line in text.splitlines()]

    def close(self) -> None:
        os.close(self._descriptor)


def log_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.log"


def error_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.error.json"


def has_failed_rank() -> bool:
    """Whether a rank of this node has reported an error; a SIGTERM of the launcher then ends the other ranks."""
    try:
        return ERROR_LOG in os.environ and Path(os.environ[ERROR_LOG]).stat().st_size > 0
    except OSError:  # the launcher has ended
        return False


def report_error(error: Exception, debug: bool = False) -> int:
    """Report the error that ended this rank, and return the exit code of the rank.

    Under aliquot's launcher the error goes to the launcher and its traceback to the rank's log; nothing goes to the
    console, which all ranks share. Otherwise one line goes to stderr, followed by the traceback if `debug`.
    """
    rank = int(os.environ.get("RANK", "0"))
    text = "".join(traceback.format_exception(error))
    error = resource_error(error) or error
    kind = classify(error)
    message = error.line if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    code, id = (error.exit_code, error.id) if isinstance(error, UserError) else (1, "")
    rank_error = RankError(rank, kind, message, text, time.time(), code, id)
    is_recorded = record_error(rank_error)
    if kind == "peer_lost":
        # The first exit of a rank ends all ranks. The rank that failed needs time to record its error.
        time.sleep(1.0)
    # Under torchrun every rank raises the same error for bad input; one rank of each node prints it.
    if not is_recorded and not (kind == "user" and os.environ.get("LOCAL_RANK", "0") != "0"):
        print(f"aliquot: {rank_error.line}", file=sys.stderr)
        if debug:
            print(text, file=sys.stderr)
        elif kind == "crash":
            print("  --debug shows the traceback", file=sys.stderr)
    return code


def bounded_call(work: Callable[[], object], limit_s: float = _BOUNDED_CALL_S) -> bool:
    """Call `work` in another thread and wait at most `limit_s`, because this process must go on even if `work` hangs.

    `work` needs a disk, a network or a terminal that may never answer. Returns False if `work` has not finished.
    """
    return bounded_value(lambda: (work(), True)[1], False, limit_s)


def bounded_value(work: Callable[[], T], default: T, limit_s: float = _BOUNDED_CALL_S) -> T:
    """Return the value of `work` as `bounded_call` calls it, or `default` if `work` has failed or not finished."""
    values: list[T] = []
    thread = threading.Thread(target=lambda: values.append(work()), daemon=True)
    thread.start()
    thread.join(limit_s)
    return values[0] if values else default


def end_rank(error: RankError) -> NoReturn:
    """Report `error` and end this process with code 1, even if the main thread or a file server hangs."""

    def report() -> None:
        if not record_error(error):
            print(f"aliquot: {error.line}", file=sys.stderr, flush=True)

    bounded_call(report)
    os._exit(1)


def record_error(error: RankError) -> bool:
    """Send the error to aliquot's launcher, and write the error beside the rank's log.

    Returns False if aliquot's launcher did not start this rank, or if nothing can be written.
    """
    is_sent, directory = _send_to_launcher(error), os.environ.get(LOG_DIRECTORY)
    if directory is None:
        return is_sent
    try:
        with open_unlinked(log_file(Path(directory), error.rank), "a", encoding="utf-8") as log:
            log.write(error.traceback if error.kind != "user" else f"{time.ctime(error.time)}: {error.message}\n")
        publish_text(error_file(Path(directory), error.rank), json.dumps(asdict(error)))
    except OSError:  # a full disk, for example, which may be the error itself
        return is_sent
    return True


def _send_to_launcher(error: RankError) -> bool:
    try:
        descriptor = os.open(os.environ[ERROR_LOG], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except (KeyError, OSError):  # no launcher has started this rank, or the launcher has ended
        return False
    with os.fdopen(descriptor, "ab", buffering=0) as log:
        log.write(f"{json.dumps(asdict(error))}\n".encode())  # one call, because other ranks write as well
    return True


def classify(error: BaseException) -> Kind:
    if isinstance(error, TrainingError):
        return "training"
    if isinstance(error, UserError):
        return "user"
    cause: BaseException | None = error
    while cause is not None:
        if _is_connection_error(cause):
            return "peer_lost"
        cause = cause.__cause__ or cause.__context__
    return "crash"


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, ConnectionError) or type(error).__name__ in _CONNECTION_ERRORS:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CONNECTION_WORDS)


def explain_failure(
    dead_ranks: Mapping[int, ProcessFailure], errors: Sequence[RankError], log_directory: Path
) -> Ended:
    """Choose the failure of a rank that caused the failures of the other ranks.

    Args:
        dead_ranks: torch's failures by global rank. torch may name only the first rank that exits, so the cause may be
            among `errors` alone.
        errors: the errors that the ranks of this launcher have recorded, in the order of recording.
    """
    recorded: dict[int, RankError | None] = dict.fromkeys(dead_ranks) | {error.rank: error for error in errors}
    rank = min(dead_ranks, key=lambda rank: _order(dead_ranks[rank], recorded[rank], errors))
    error = recorded[rank]
    lines = [f"aliquot: {_describe(rank, dead_ranks[rank], error)}"]
    if _order(dead_ranks[rank], error, errors)[0] > 0:
        causes = (error for error in errors if error.kind != "peer_lost" and error.exit_code <= 2)
        if (cause := next(causes, None)) is not None:
            rank, error, lines = cause.rank, cause, [f"aliquot: {cause.line}"]
    if error is not None and error.exit_code != 1:
        return Ended(error.exit_code, tuple(lines), error.kind, error.id)
    if bounded_value(log_file(log_directory, rank).exists, False):
        lines.append(f"  more in {log_file(log_directory, rank)}")
    return Ended(1, tuple(lines), "killed") if error is None else Ended(1, tuple(lines), error.kind, error.id)


def explain_stop(number: signal.Signals, errors: Sequence[RankError]) -> Ended:
    """Return the lines for the console and the exit code of a launcher that has received a stop signal.

    The code is 128 + signal, unless a rank failed, for example because it could not save.
    """
    stopped = 128 + number
    failed = [error for error in errors if error.exit_code != stopped and error.kind != "peer_lost"]
    obeyed = [error for error in errors if error.exit_code == stopped]
    if not obeyed:
        failed = failed or list(errors)  # only lost connections, which no other error explains: a rank did not save
    for error in (failed or obeyed)[:1]:
        return Ended(error.exit_code if failed else stopped, (f"aliquot: {error.line}",), "stopped")
    return Ended(stopped, (f"aliquot: stopped by {number.name}",), "stopped")


def _order(dead: ProcessFailure, error: RankError | None, errors: Sequence[RankError]) -> tuple[int, float]:
    """Sort key: causes before consequences, then the order of `errors`, because a clock may be set during a run."""
    if error is not None:
        return (2 if error.kind == "peer_lost" else 0), errors.index(error)
    position = sum(error.time < dead.timestamp for error in errors) - 0.5
    if dead.exitcode == -signal.SIGTERM:
        return 3, position  # the launcher ends the remaining ranks with SIGTERM
    if dead.exitcode == -signal.SIGABRT:
        return 1, position  # torch may abort after a lost connection
    return 0, position


def _describe(rank: int, dead: ProcessFailure, error: RankError | None) -> str:
    if error is not None:
        return error.line
    if dead.exitcode >= 0:
        return f"rank {rank} ended with exit code {dead.exitcode} [crash]"
    number = -dead.exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"rank {rank} was killed by {name}{' (out of memory?)' if number == signal.SIGKILL else ''} [killed]"


def judge(
    reports: Sequence[Ended], nodes_changed: bool, has_newcomers: bool, failed_here: bool
) -> tuple[Verdict, Ended]:
    """Return the verdict about a round, and the report that caused it.

    Args:
        reports: one of each remaining node.
        nodes_changed: whether a node has left, joined or been lost, which ends the ranks of the other nodes.
        has_newcomers: whether the round has nodes that have never trained, beside nodes that have.
        failed_here: whether the last failure came after the same checkpoint.
    """
    causes = [report for report in reports if report.code and report.kind != "peer_lost"] or [*reports, Ended(1)]
    recurring = next((cause for cause in causes if cause.code == 2 or cause.id in _RECURRING), None)
    if reports and not any(report.code for report in reports):
        return "finish", causes[0]
    if recurring is not None:
        return ("send away" if recurring.code == 2 and has_newcomers else "end"), recurring
    if not nodes_changed and causes[0].code > 2:  # the ranks received a signal directly
        return "end", causes[0]
    if not nodes_changed and failed_here:
        return "end", replace(causes[0], lines=(*causes[0].lines, "  twice since the last checkpoint: the run ends"))
    return "retry", causes[0]
