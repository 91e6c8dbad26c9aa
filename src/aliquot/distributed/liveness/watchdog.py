"""What all watchdogs share: a thread, the stage of the run that they name, and the end of a rank whose run hangs.

The error line names the ranks for which the other ranks wait, according to the stack traces of all ranks.
"""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from aliquot.core.small_files import read_small_file
from aliquot.distributed.flight_recorder import describe_pending
from aliquot.distributed.rank_errors import RankError, bounded_value, end_rank
from aliquot.distributed.topology import Topology

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$')
_RANK_OF_FILE = re.compile(r"(\d+)\.txt$")
_REST_S = 30.0  # a stage that lasts longer is shown
_SAME_HANG_S = 60.0  # stack files whose times differ by more belong to different hangs
_WAITING = re.compile(  # "file function" of a frame that waits for other ranks
    r"torch/distributed/|aliquot/distributed/(?:collectives/|ranks\.py) "
    r"|engines/host/gradient_exchange\.py _wait_for_space$"
)


class Watchdog(ABC):
    """A context manager that calls `check` again and again in a thread, until the context ends.

    Each watchdog has a thread of its own, because a check may wait for a disk or for another host.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.is_over = threading.Event()

    @abstractmethod
    def check(self) -> None:
        """Look once, and end this process if the run hangs."""

    def __enter__(self) -> Self:
        self.repeat(self.check)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop watching. Further calls have no effect."""
        self.is_over.set()

    def repeat(self, check: Callable[[], None]) -> None:
        """Call `check` in a thread, once an interval."""

        def run() -> None:
            while not self.is_over.wait(self.interval_s):
                check()

        threading.Thread(target=run, name=f"aliquot-{type(self).__name__}", daemon=True).start()


@dataclass(frozen=True)
class WatchedRank:
    """The rank that watchdogs observe, and how it ends if its run hangs."""

    topology: Topology
    timeout_s: float  # launch.step_timeout_s
    activity: Callable[[], str]  # returns what the rank is doing, for error lines
    logs: Path | None = None  # the directory of stack traces; None: they go to stderr
    explain_hang: Callable[[], None] = lambda: None  # called first; may end the process itself (see Heartbeat)

    def end_by_hang(self, message: str, stack_file: Path | None) -> NoReturn:
        """End this process with code 1, after all ranks have written their stack files.

        The error line says for what it waits.
        """
        self.explain_hang()
        stuck, place = "", "above"
        if stack_file is not None:
            stuck = describe_stuck_ranks(stack_file, self.topology.world_size)
            place = str(all_stack_files(stack_file))
        waits = f"{self.activity()}{describe_pending()}{stuck}"
        line = f"{message} while {waits}; where every rank was: {place} [hung]"
        end_rank(RankError(self.topology.rank, "training", line, f"{line}\n", time.time()))


def describe_stuck_ranks(stack_file: Path, world_size: int) -> str:
    """Return text for an error line: the ranks for which the other ranks wait, or the ranks that do not answer.

    `stack_file` has the stack traces of this rank; the files of the other ranks are in the same directory. The text is
    empty if no rank or every rank waits for others, or if reading the files takes longer than three seconds.
    """
    return bounded_value(lambda: _describe(stack_file, world_size), "")


def all_stack_files(stack_file: Path) -> Path:
    """A glob pattern of the stack files of all ranks."""
    return stack_file.with_name(_RANK_OF_FILE.sub("*.txt", stack_file.name))


def _describe(stack_file: Path, world_size: int) -> str:
    paths = {
        int(number[1]): file
        for file in stack_file.parent.glob(all_stack_files(stack_file).name)
        if (number := _RANK_OF_FILE.search(file.name)) and file.is_file() and not file.is_symlink()
    }
    files = {rank: paths[rank] for rank in sorted(paths) if rank < world_size}
    if stuck := _stuck_ranks(stack_file, files):
        places = ", ".join(f"rank {rank} stands still at {place}" for rank, place in stuck.items())
        return f"; {places}{', and the others wait for it' * (len(stuck) == 1)}"
    silent = [str(rank) for rank, file in files.items() if file != stack_file and file.stat().st_size == 0]
    if silent:
        return f"; no answer from rank {', '.join(silent)}: its process is stopped, or its host is out of reach"
    return ""


def _stuck_ranks(stack_file: Path, files: dict[int, Path]) -> dict[int, str]:
    """The ranks that do not wait for other ranks, with their `file:line in function`; empty if that holds for all."""
    written_at = stack_file.stat().st_mtime
    files = {rank: file for rank, file in files.items() if abs(file.stat().st_mtime - written_at) < _SAME_HANG_S}
    stuck = {}
    for rank, file in files.items():
        frames = _main_thread_frames(read_small_file(file, links="none").decode(errors="replace"))
        if frames and not any(_WAITING.search(f"{frame['file']} {frame['name']}") for frame in frames):
            stuck[rank] = f"{Path(frames[0]['file']).name}:{frames[0]['line']} in {frames[0]['name']}"
    return stuck if len(stuck) < len(files) else {}


def _main_thread_frames(text: str) -> list[re.Match[str]]:
    """The frames of the main thread, which faulthandler writes last, from the innermost frame to the script."""
    thread = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]
    frames = [frame for frame in map(_FRAME.match, thread.splitlines()) if frame is not None]
    # Frames after the script's belong to the program that started the script.
    count = next((number for number, frame in enumerate(frames, 1) if frame["name"] == "<module>"), len(frames))
    return frames[:count]


class Activity:
    """The current stage of this rank, which heartbeat and watchdogs report when a node is lost or the run hangs."""

    def __init__(self) -> None:
        self.stage = "beginning"

    def enter(self, stage: str, saving: int | None = None) -> None:
        """Enter a stage, for example "planning". `saving`: the step whose checkpoint is being written."""
        self.stage = stage if saving is None else f"{stage}, and saving step {saving}"


class PhaseNotice(Watchdog):
    """A context manager that shows a stage that has lasted for 30 seconds, once: silence would look like a hang."""

    def __init__(self, activity: Activity, show: Callable[[str], None]) -> None:
        super().__init__(_REST_S)
        self._activity, self._show = activity, show
        self._before = self._shown = ""

    def check(self) -> None:
        stage = self._activity.stage
        if stage == self._before != self._shown:
            self._show(f"still {stage}")
            self._shown = stage
        self._before = stage
