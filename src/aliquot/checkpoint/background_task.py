"""Run a save or an upload in threads. All ranks learn the outcome at the next step, or wait for the end together."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import CutOffError, RunDirectoryError, StorageError, StorageFailureError, UserError
from aliquot.core.on_rank_0 import RankGroup
from aliquot.machine.device_copies import on_this_gpu
from aliquot.machine.memory import unwritten_bytes

TaskReport = dict[str, Any]

_PROGRESS_INTERVAL_S = 0.5  # ranks that wait for each other exchange their progress this often


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True)
class SaveEvents:
    """Callbacks through which saves and uploads report to the run; every rank calls them."""

    warn: Callable[[str], None]  # called if a save or an upload failed and `checkpoint.on_error` is warn
    inform: Callable[[str], None] = _ignore
    # Called after a save, with the step, the seconds of the save, and the seconds that training waited for the save.
    on_saved: Callable[[int, float, float], None] = _ignore
    on_failed: Callable[[int], None] = _ignore  # called with the step of a failed save, before `warn`
    heartbeat: Callable[[], None] = _ignore
    # Raises UserError if the run directory no longer belongs to this run. Rank 0 calls `check_directory` before it
    # begins or publishes a checkpoint, and after a failure, to find the cause.
    check_directory: Callable[[], None] = _ignore
    protected_steps: Callable[[], Collection[int]] = tuple  # steps of checkpoints that retention must not remove yet


class BackgroundTask:
    """Run `work` in a thread, and hold the result or the error of the work."""

    def __init__(self, name: str, work: Callable[[], Any], on_error: Callable[[], None] = _ignore) -> None:
        self.result: Any = None
        self.seconds = 0.0  # duration of the work
        self._error: str | None = None
        self._error_id: str | None = None
        self._on_error = on_error
        self._thread = threading.Thread(target=on_this_gpu(self._run), args=[work], name=name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        start = time.perf_counter()
        try:
            self.result = work()
        # Hand every exception to the training thread, because only the training thread can inform the other ranks.
        except Exception as error:
            self._error = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._error_id = error.id if isinstance(error, UserError) else StorageError.id
            self._on_error()
        finally:
            self.seconds = time.perf_counter() - start

    def report(self) -> TaskReport:
        """Return the state of the work as JSON, for the other ranks."""
        return {"done": not self._thread.is_alive(), "error": self._error, "kind": self._error_id}

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the work has ended, or for `timeout_s`; return whether the work has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class PhasedWork(ABC):
    """Background work of all ranks in phases: a phase begins when all ranks have ended the phase before.

    Each rank runs a phase in a thread. Only the training thread runs collectives, at the same points on all ranks: in
    each step the ranks gather their reports, and `poll` then acts on the reports of all ranks.
    """

    def __init__(self, name: str, ranks: RankGroup, settings: CheckpointSection, events: SaveEvents) -> None:
        self._name = name  # of the threads
        self._ranks = ranks
        self._settings = settings
        self._events = events
        self._task: BackgroundTask | None = None  # the current phase; None if no work is in progress
        self._after: Callable[[BackgroundTask], None] = _ignore  # called when all ranks have ended the current phase

    def _begin(
        self, work: Callable[[], Any], after: Callable[[BackgroundTask], None], on_error: Callable[[], None] = _ignore
    ) -> None:
        """Begin a phase, and call `after`, a collective, when all ranks have ended it."""
        self._task, self._after = BackgroundTask(self._name, work, on_error), after

    @abstractmethod
    def _fail(self, error: UserError) -> None:
        """End the work; raise or warn, by `checkpoint.on_error`. Collective."""

    @abstractmethod
    def _done_bytes(self) -> int:
        """Count the bytes that this rank has written or sent."""

    def report(self) -> TaskReport | None:
        """Return the state of this rank's work, to be gathered for `poll`; None if no work is in progress."""
        return self._task.report() if self._task is not None else None

    def poll(self, reports: Sequence[TaskReport | None]) -> None:
        """Begin the next phase if all ranks have ended the current phase. Collective.

        `reports` are the results of `report` on all ranks, gathered in the same step. Raises the same UserError on
        every rank if a rank failed and `checkpoint.on_error` is stop.
        """
        states = [report for report in reports if report is not None]
        if self._task is None or not states:
            return
        if (error := _first_failure(states)) is not None:
            self._fail(error)
        elif all(state["done"] for state in states):
            self._after(self._task)

    def finish(self) -> None:
        """Wait for the end of all work. Collective."""
        while (task := self._task) is not None:
            self._wait(task.join)
            self.poll(self._ranks.gather(self.report()))

    def _wait(self, wait: Callable[[float], bool]) -> None:
        """Call `wait`, which blocks for at most the given seconds, until it returns True on every rank. Collective.

        So that the watchdog does not take a slow disk for a hang, every rank calls the heartbeat while there is
        progress: while any rank writes, or while the page cache of any node has fewer and fewer bytes to write back.
        """
        previous: list[tuple[int, int]] = []  # by rank: bytes written, lowest number of bytes to write back
        while True:
            is_done = wait(_PROGRESS_INTERVAL_S)
            answers = self._ranks.gather([is_done, self._done_bytes(), unwritten_bytes()])
            if all(done for done, _, _ in answers):
                self._events.heartbeat()
                return
            current = [(written, unwritten) for _, written, unwritten in answers]
            pairs = list(zip(current, previous or current, strict=True))
            if any(written > before or unwritten < lowest for (written, unwritten), (before, lowest) in pairs):
                self._events.heartbeat()
            previous = [(written, min(unwritten, lowest)) for (written, unwritten), (_, lowest) in pairs]


def _first_failure(reports: Sequence[TaskReport]) -> UserError | None:
    """Return the error of the first rank that failed, the same on every rank; None if no rank failed.

    An error other than StorageError ends the run, even if `checkpoint.on_error` is warn.
    """
    fatal = {kind.id: kind for kind in (CutOffError, RunDirectoryError)}
    for rank, report in enumerate(reports):
        if report["error"] and report["kind"] in fatal:
            return fatal[report["kind"]](report["error"])
        if report["error"]:
            kind = StorageFailureError if report["kind"] == StorageFailureError.id else StorageError
            return kind(f"rank {rank}: {report['error']}")
    return None
