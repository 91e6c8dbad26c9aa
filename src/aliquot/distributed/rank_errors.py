"""How a rank says what ended it: to its launcher, so that the cause is shown first and the echo not.

When one rank dies its peers die of the lost connection a moment later. Each rank records its error with a kind, and
`peer_lost` ones are only the echo. The launcher has a file in memory for what its own ranks say, which no full disk and
no other run takes from it; for people, and for a report, each error lies beside the rank's log, too.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn

from aliquot.core.errors import TrainingError, UserError, printable, resource_error
from aliquot.core.small_files import open_unlinked, publish_text
from aliquot.distributed.bounded_call import within_a_moment

LOG_DIRECTORY = "ALIQUOT_LOG_DIRECTORY"  # set by our launcher in its ranks, and only there
LAST_WORDS = "ALIQUOT_LAST_WORDS"  # where ranks find that file of their launcher

Kind = Literal["user", "training", "crash", "peer_lost"]

_CONNECTION_ERRORS = {"DistNetworkError", "DistStoreError", "DistBackendError"}
_CONNECTION_WORDS = (
    "gloo/transport",
    "connectFullMesh",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
)
_GLOO_PEER = re.compile(r"gloo/transport.* \[([^\[\]]+)\]:\d")


@dataclass(frozen=True)
class RankError:
    """One rank's last words."""

    rank: int
    kind: Kind
    message: str
    traceback: str
    time: float  # seconds since the epoch
    exit_code: int = 1

    @property
    def line(self) -> str:
        """One line for a console that several ranks may share."""
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


class LastWords:
    """What the ranks of one start have said of their ends: a file in memory that is gone with this process."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("aliquot-last-words")
        self.place = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> list[RankError]:
        words = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).decode()
        return [RankError(**json.loads(line)) for line in words.splitlines()]

    def close(self) -> None:
        os.close(self._descriptor)


def log_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.log"


def error_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.error.json"


def report_error(error: Exception, debug: bool = False) -> int:
    """Tell the person, or the launcher, what ended this rank; the exit code: 2 for bad input, 1 otherwise.

    Under our launcher the error goes to a file, its traceback to the rank's log, and nothing to the console that all
    ranks share. Otherwise one line goes to stderr, followed by the traceback if `debug`.
    """
    rank = int(os.environ.get("RANK", "0"))
    text = "".join(traceback.format_exception(error))
    error = resource_error(error) or error
    kind = classify(error)
    message = error.line if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    code = error.exit_code if isinstance(error, UserError) else 1
    own = RankError(rank, kind, message, text, time.time(), code)
    recorded = record_error(own)
    if kind == "peer_lost":
        # The first rank to exit has all others ended: leave the one that failed the time to say why.
        time.sleep(1.0)
    # Under torchrun every rank meets the same bad input; one a node says so.
    if not recorded and not (kind == "user" and os.environ.get("LOCAL_RANK", "0") != "0"):
        print(f"aliquot: {own.line}", file=sys.stderr)
        if debug:
            print(text, file=sys.stderr)
        elif kind == "crash":
            print("  --debug shows the traceback", file=sys.stderr)
    return code


def end_rank(error: RankError) -> NoReturn:
    """Say it and end with code 1, whatever the main thread waits for: a log on a file server that does not answer is
    not waited for."""

    def say() -> None:
        if not record_error(error):
            print(f"aliquot: {error.line}", file=sys.stderr, flush=True)

    within_a_moment(say)
    os._exit(1)


def record_error(error: RankError) -> bool:
    """Tell our launcher, and write it beside the log. False: it did not start this rank, or nothing can be written."""
    told, directory = _tell_launcher(error), os.environ.get(LOG_DIRECTORY)
    if directory is None:
        return told
    try:
        with open_unlinked(log_file(Path(directory), error.rank), "a", encoding="utf-8") as log:
            log.write(error.traceback if error.kind != "user" else f"{time.ctime(error.time)}: {error.message}\n")
        publish_text(error_file(Path(directory), error.rank), json.dumps(asdict(error)))
    except OSError:  # the disk is full, which may be the very error
        return told
    return True


def _tell_launcher(error: RankError) -> bool:
    place = os.environ.get(LAST_WORDS)
    if place is None:
        return False
    try:
        words = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # it has ended
        return False
    try:
        os.write(words, f"{json.dumps(asdict(error))}\n".encode())  # at once: others write, too
    finally:
        os.close(words)
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
