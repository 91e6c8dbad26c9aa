"""Save checkpoints while training continues: a thread writes the parts during the next forward and backward passes.

Only the training thread runs collectives, at moments that all ranks share: in each step every rank gathers a small
`report`, and `poll` acts on the reports of all ranks. A save therefore ends one or two steps after its last write:

start -> (every rank writes) -> poll: all ranks have written, gather checksums -> (rank 0 publishes) -> poll: published
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aliquot.checkpoint.background_task import BackgroundTask, SaveEvents, TaskReport, first_failure, wait_on_all_ranks
from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.live_parts import CpuCopier, HostCopier, LiveParts
from aliquot.checkpoint.retention import Retention
from aliquot.checkpoint.save import Draft
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import StorageError, UserError
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.tensor_io.checksums import Piece
from aliquot.tensor_io.parts import PartSource
from aliquot.tensor_io.transfer import Progress


class Saver:
    """Saves one checkpoint at a time.

    Args:
        spec: contents of every checkpoint, the same on every rank.
        make_copier: makes the copier from the engine's device into host memory, at the start of a save.
    """

    def __init__(
        self,
        root: Path,
        store: PartSource,
        spec: CheckpointSpec,
        ranks: RankGroup,
        settings: CheckpointSection,
        events: SaveEvents,
        make_copier: Callable[[], HostCopier] = CpuCopier,
    ) -> None:
        self._root = root
        self._store = store
        self._spec = spec
        self._ranks = ranks
        self._settings = settings
        self._events = events
        self._make_copier = make_copier
        self._written_bytes = 0
        self._step = 0
        self._best: int | None = None
        self._worked_s = 0.0
        self._stall_s = 0.0
        self._draft: Draft | None = None
        self._live: LiveParts | None = None  # None: all parts are written, rank 0 publishes
        self._task: BackgroundTask | None = None

    def start(self, step: int, state: Mapping[str, Any], best: int | None = None) -> None:
        """Begin to save; without `checkpoint.async` also wait for the end. Collective. Raises UserError as `poll` does.

        Args:
            best: the step whose checkpoint retention keeps in addition to the newest ones; it may be `step` itself.
        """
        self.finish()
        self._best = best
        self._step, self._stall_s, self._worked_s = step, 0.0, 0.0
        check_directory = self._events.check_directory
        with self._count_stall():
            try:
                run_on_rank_0(self._ranks, check_directory)
                self._draft = Draft.begin(self._root, step, self._spec, state, self._ranks)
                run_on_rank_0(self._ranks, check_directory)  # somebody may have replaced the directory just now
            except UserError as error:
                if self._draft is not None and self._ranks.rank == 0:
                    self._draft.abandon()
                self._draft = None
                self._fail(error)
                return
            self._written_bytes = 0
            draft, live = self._draft, LiveParts(self._store, self._settings.buffer_bytes, self._make_copier())
            self._live = live
            self._task = BackgroundTask(
                "aliquot-saver", lambda: draft.write(live, self._record_progress), on_error=live.stop
            )
        if not self._settings.asynchronous:
            self.finish()

    @property
    def best(self) -> int | None:
        """The best step at the beginning of the newest save."""
        return self._best

    @property
    def current_step(self) -> int | None:
        """The step of the save that is in progress; None if no save is."""
        return self._step if self._task is not None else None

    @property
    def worked_s(self) -> float:
        """Seconds that this rank worked on the newest save. The save itself takes longer, because its end is noticed
        only at the next poll."""
        return self._worked_s

    def report(self) -> TaskReport | None:
        """Return the progress of this rank, which `poll` takes from all ranks; None if no save is in progress."""
        return self._task.report() if self._task is not None else None

    def poll(self, reports: Sequence[TaskReport | None]) -> None:
        """Begin the next phase of the save if all ranks are ready. Collective, with the reports of all ranks gathered
        at one moment.

        Raises the same UserError on every rank if a rank could not write and `checkpoint.on_error` is stop.
        """
        states = [report for report in reports if report is not None]
        if self._draft is None or self._task is None or not states:
            return
        if (error := first_failure(states)) is not None:
            self._abandon()
            self._fail(error)
        elif all(state["done"] for state in states):
            self._advance(self._draft, self._task)

    def before_update(self) -> None:
        """Return when the optimizer may change the weights and moments."""
        if (live := self._live) is not None:
            with self._count_stall():
                self._wait(live.release)

    def finish(self) -> None:
        """Wait for the end of the save that is in progress. Collective."""
        while (task := self._task) is not None:
            with self._count_stall():
                self._wait(task.join)
                reports = self._ranks.gather(self.report())
            self.poll(reports)

    def _wait(self, wait: Callable[[float], bool]) -> None:
        wait_on_all_ranks(self._ranks, wait, lambda: self._written_bytes, self._events.heartbeat)

    def _record_progress(self, progress: Progress) -> None:
        self._written_bytes = progress.done_bytes

    def _advance(self, draft: Draft, task: BackgroundTask) -> None:
        self._worked_s += task.seconds
        if self._live is None:
            self._draft = self._task = None
            # The wall clock would count an evaluation between the end of the save and this poll.
            self._events.on_saved(self._step, max(self._worked_s, self._stall_s), self._stall_s)
            return
        self._live = None
        pieces: list[list[Piece]] = self._ranks.gather(task.result)
        retention = Retention(self._settings.keep, self._best, self._events.protected_steps())

        def publish() -> None:
            if self._ranks.rank == 0:
                self._events.check_directory()
                draft.publish(pieces, retention)

        self._task = BackgroundTask("aliquot-saver", publish)

    def _abandon(self) -> None:
        """Stop the writes of every rank, then let rank 0 remove the partial checkpoint."""
        assert self._draft is not None and self._task is not None
        if self._live is not None:
            self._live.stop()
        self._task.join()
        self._ranks.gather(None)
        if self._ranks.rank == 0:
            self._draft.abandon()
        self._draft = self._live = self._task = None

    @contextmanager
    def _count_stall(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stall_s += time.perf_counter() - start

    def _fail(self, error: UserError) -> None:
        """Raise or warn, by `checkpoint.on_error`. Collective."""
        run_on_rank_0(self._ranks, self._events.check_directory)  # in a directory that was removed every write fails
        if self._settings.on_error == "stop" or not isinstance(error, StorageError):
            raise error
        self._events.on_failed(self._step)
        self._events.warn(f"a checkpoint could not be saved, training goes on: {error}")
