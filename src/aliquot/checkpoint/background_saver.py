"""Saving beside training: the parts drain to disk in a thread while the next forward and backward run.

Collectives happen on the training thread alone, at moments that all ranks share: each step every rank gathers a small
`report`, and `poll` acts on the reports of all ranks. So a save ends a step or two after it was started:

start -> (drain on every rank) -> poll: all drained, pieces gathered -> (publish on rank 0) -> poll: published
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aliquot.checkpoint.background_task import Background, Report, failure, wait_together
from aliquot.checkpoint.live_parts import Copies, FromHost, LiveParts
from aliquot.checkpoint.save import Draft
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import StorageError, UserError
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.optim.sizes import States
from aliquot.tensor_io.bytemap import Shape
from aliquot.tensor_io.checksums import Piece
from aliquot.tensor_io.parts import PartSource
from aliquot.tensor_io.transfer import Progress


class Saver:
    """Saves one checkpoint at a time. `warn` is told of one that failed where `checkpoint.on_error` is warn.

    `saved` is told of each one that is published, on every rank: its step, the seconds that it took to come about, and
    those that training stood still for it here; `failed` of the step of one of which `warn` is told. `spare` tells of
    which steps checkpoints are still needed, although newer ones take their place. `may_publish` raises UserError on
    rank 0 where none must appear; it is asked before a checkpoint is begun, before it is published, and for the cause
    of one that failed. `copies` makes what copies from where the store computes.
    """

    def __init__(
        self,
        root: Path,
        store: PartSource,
        tensors: Sequence[tuple[str, Shape]],
        config_files: Mapping[str, bytes],
        ranks: RankGroup,
        settings: CheckpointSection,
        warn: Callable[[str], None],
        saved: Callable[[int, float, float], None] = lambda *_: None,
        failed: Callable[[int], None] = lambda _: None,
        beat: Callable[[], None] = lambda: None,
        states: States = "fp32",
        learned: Collection[str] | None = None,
        spare: Callable[[], Collection[int]] = lambda: (),
        may_publish: Callable[[], None] = lambda: None,
        copies: Callable[[], Copies] = FromHost,
    ) -> None:
        self._copies = copies
        self._may_publish = may_publish
        self._spare = spare
        self._root = root
        self._store = store
        self._tensors = tensors
        self._config_files = config_files
        self._ranks = ranks
        self._settings = settings
        self._warn = warn
        self._saved = saved
        self._failed = failed
        self._beat = beat
        self._states = states
        self._learned = learned
        self._written_bytes = 0
        self._step = 0
        self._best: int | None = None
        self._worked_s = 0.0
        self._stall_s = 0.0
        self._draft: Draft | None = None
        self._live: LiveParts | None = None  # None: drained, rank 0 publishes
        self._work: Background | None = None

    def start(self, step: int, state: Mapping[str, Any], best: int | None = None) -> None:
        """Begin to save; without `checkpoint.async` also end. Collective. Raises UserError as `poll` does.

        `best`: the step whose checkpoint is kept beside the newest, perhaps this one.
        """
        self.finish()
        self._best = best
        self._step, self._stall_s, self._worked_s = step, 0.0, 0.0
        with self._standing_still():
            try:
                run_on_rank_0(self._ranks, self._may_publish)
                self._draft = Draft.begin(
                    self._root, step, self._tensors, state, self._config_files, self._ranks, self._states, self._learned
                )
                run_on_rank_0(self._ranks, self._may_publish)  # the run directory may have been replaced just now
            except UserError as error:
                if self._draft is not None and self._ranks.rank == 0:
                    self._draft.abandon()
                self._draft = None
                self._give_up(error)
                return
            self._written_bytes = 0
            draft, live = self._draft, LiveParts(self._store, self._settings.buffer_bytes, self._copies())
            self._live = live
            self._work = Background("aliquot-saver", lambda: draft.write(live, self._count), on_error=live.stop)
        if not self._settings.asynchronous:
            self.finish()

    @property
    def best(self) -> int | None:
        """The step that was best when the newest save began."""
        return self._best

    @property
    def under_way(self) -> int | None:
        """The step whose checkpoint is being saved."""
        return self._step if self._work is not None else None

    @property
    def worked_s(self) -> float:
        """Seconds that this rank has spent on the newest save, which takes longer to be noticed beside training."""
        return self._worked_s

    def report(self) -> Report | None:
        """Where this rank stands, for the reports that `poll` takes; None: nothing is being saved."""
        return self._work.report() if self._work is not None else None

    def poll(self, reports: Sequence[Report | None]) -> None:
        """Go on as far as all ranks have come. Collective, with the reports of all ranks gathered at one moment.

        Raises the same UserError on every rank where a rank could not write and `checkpoint.on_error` is stop.
        """
        states = [report for report in reports if report is not None]
        if self._draft is None or self._work is None or not states:
            return
        if (failed := failure(states)) is not None:
            self._abandon()
            self._give_up(failed)
        elif all(state["done"] for state in states):
            self._advance(self._draft, self._work)

    def before_update(self) -> None:
        """Return when the live weights and moments may change."""
        if (live := self._live) is not None:
            with self._standing_still():
                self._wait(live.release)

    def finish(self) -> None:
        """Wait for the save that is under way. Collective."""
        while (work := self._work) is not None:
            with self._standing_still():
                self._wait(work.join)
                reports = self._ranks.gather(self.report())
            self.poll(reports)

    def _wait(self, arrived: Callable[[float], bool]) -> None:
        wait_together(self._ranks, arrived, lambda: self._written_bytes, self._beat)

    def _count(self, progress: Progress) -> None:
        self._written_bytes = progress.done_bytes

    def _advance(self, draft: Draft, work: Background) -> None:
        self._worked_s += work.seconds
        if self._live is None:
            self._draft = self._work = None
            # Not until now, when ranks meet: an evaluation may lie between.
            self._saved(self._step, max(self._worked_s, self._stall_s), self._stall_s)
            return
        self._live = None
        pieces: list[list[Piece]] = self._ranks.gather(work.result)
        keep, best, spare = self._settings.keep, self._best, self._spare()

        def publish() -> None:
            if self._ranks.rank == 0:
                self._may_publish()
                draft.publish(pieces, keep, best, spare)

        self._work = Background("aliquot-saver", publish)

    def _abandon(self) -> None:
        """Every rank stops writing before rank 0 removes what was written."""
        assert self._draft is not None and self._work is not None
        if self._live is not None:
            self._live.stop()
        self._work.join()
        self._ranks.gather(None)
        if self._ranks.rank == 0:
            self._draft.abandon()
        self._draft = self._live = self._work = None

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._stall_s += time.perf_counter() - begun

    def _give_up(self, error: UserError) -> None:
        """Collective."""
        run_on_rank_0(self._ranks, self._may_publish)  # in a directory that is gone every write fails
        if self._settings.on_error == "stop" or not isinstance(error, StorageError):
            raise error
        self._failed(self._step)
        self._warn(f"a checkpoint could not be saved, training goes on: {error}")
