"""Save checkpoints while training continues: threads write them during the next forward and backward passes.

Ranks learn the progress of all ranks once per step, by `poll`. In parentheses, the phases that run in threads:

start -> (every rank writes) -> poll: all ranks have written, gather checksums -> (rank 0 publishes) -> poll: published

A save therefore ends one or two steps after its last write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aliquot.checkpoint.background_task import BackgroundTask, PhasedWork, SaveEvents
from aliquot.checkpoint.checkpoint_files import CheckpointSpec
from aliquot.checkpoint.live_parts import CpuCopier, LiveParts
from aliquot.checkpoint.retention import Retention
from aliquot.checkpoint.save import Draft
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import StorageError, UserError
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.tensor_io.checksums import Piece
from aliquot.tensor_io.parts import PartSource
from aliquot.tensor_io.transfer import Progress


class Saver(PhasedWork):
    """Saves one checkpoint at a time.

    `make_copier` is called at the start of each save and returns the object that copies values into host memory.
    """

    def __init__(
        self,
        root: Path,
        store: PartSource,
        spec: CheckpointSpec,
        ranks: RankGroup,
        settings: CheckpointSection,
        events: SaveEvents,
        make_copier: Callable[[], CpuCopier] = CpuCopier,
    ) -> None:
        super().__init__(ranks, settings, events)
        self._root = root
        self._store = store
        self._spec = spec
        self._make_copier = make_copier
        self._written_bytes = 0
        self._step = 0
        self.best: int | None = None  # the step that evaluated best when the newest save began
        self.worked_s = 0.0  # seconds that this rank's threads have worked on the newest save
        self._stall_s = 0.0  # seconds that training waited for the newest save
        self._draft: Draft | None = None
        self._live: LiveParts | None = None  # None: all parts are written, and rank 0 publishes the checkpoint

    def start(self, step: int, state: Mapping[str, Any], best: int | None = None) -> None:
        """Begin to save a checkpoint; if `checkpoint.async` is false, wait until it is saved. Collective.

        Besides the newest checkpoints, retention keeps the checkpoint of step `best`, which may be `step` itself.
        Raises UserError as `poll` does.
        """
        self.finish()
        self._step, self.best = step, best
        self._stall_s = self.worked_s = 0.0
        began = time.perf_counter()
        try:
            run_on_rank_0(self._ranks, self._events.check_directory)
            self._draft = Draft.begin(self._root, step, self._spec, state, self._ranks)
            run_on_rank_0(self._ranks, self._events.check_directory)  # another run may have just replaced the directory
        except UserError as error:
            self._fail(error)
            return
        self._written_bytes = 0
        draft, live = self._draft, LiveParts(self._store, self._settings.buffer_bytes, self._make_copier())
        self._live = live
        self._task = BackgroundTask(
            "aliquot-saver", lambda: draft.write(live, self._record_progress), on_error=live.stop
        )
        self._stall_s = time.perf_counter() - began
        if not self._settings.asynchronous:
            self.finish()

    @property
    def current_step(self) -> int | None:
        """Return the step of the save in progress; None if no save is in progress."""
        return self._step if self._task is not None else None

    def before_update(self) -> None:
        """Wait until the save in progress no longer reads live weights and moments, so that the optimizer may run."""
        if (live := self._live) is not None:
            self._wait(live.release)

    def _wait(self, wait: Callable[[float], bool]) -> None:
        start = time.perf_counter()
        super()._wait(wait)
        self._stall_s += time.perf_counter() - start

    def _record_progress(self, progress: Progress) -> None:
        self._written_bytes = progress.done_bytes

    def _done_bytes(self) -> int:
        return self._written_bytes

    def _next_phase(self, task: BackgroundTask) -> None:
        self.worked_s += task.seconds
        if self._live is None:
            self._draft = self._task = None
            # Time since the start would include an evaluation between the end of the save and this poll.
            self._events.on_saved(self._step, max(self.worked_s, self._stall_s), self._stall_s)
            return
        self._live = None
        pieces: list[list[Piece]] = self._ranks.gather(task.result)
        retention = Retention(self._settings.keep, self.best, self._events.protected_steps())
        draft = self._draft
        assert draft is not None

        def publish() -> None:
            if self._ranks.rank == 0:
                self._events.check_directory()
                draft.publish(pieces, retention)

        self._task = BackgroundTask("aliquot-saver", publish)

    def _fail(self, error: UserError) -> None:
        """Stop the writes of every rank, let rank 0 remove the partial checkpoint, and raise or warn."""
        if self._live is not None:
            self._live.stop()
        if self._task is not None:
            self._task.join()
            self._ranks.gather(None)
        if self._draft is not None and self._ranks.rank == 0:
            self._draft.abandon()
        self._draft = self._live = self._task = None
        # If the run directory was removed or replaced, report that instead of the failed write.
        run_on_rank_0(self._ranks, self._events.check_directory)
        if self._settings.on_error == "stop" or not isinstance(error, StorageError):
            raise error
        self._events.on_failed(self._step)
        self._events.warn(f"a checkpoint could not be saved, training goes on: {error}")
