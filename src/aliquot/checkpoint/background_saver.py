"""Saving beside training: the parts drain to disk in a thread while the next forward and backward run.

Collectives happen on the training thread alone, at moments that all ranks share: each step every rank gathers a small
`report`, and `poll` acts on the reports of all ranks. So a save ends a step or two after it was started:

start -> (drain on every rank) -> poll: all drained, pieces gathered -> (publish on rank 0) -> poll: published
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aliquot.checkpoint.live_parts import LiveParts
from aliquot.checkpoint.save import Draft
from aliquot.config.schema import CheckpointSection
from aliquot.errors import StorageError, UserError
from aliquot.machine.memory import unwritten_bytes
from aliquot.optim.sizes import States
from aliquot.ranges.bytemap import Shape
from aliquot.ranges.checksums import Piece
from aliquot.ranges.parts import PartSource
from aliquot.ranges.together import RankGroup
from aliquot.ranges.transfer import Progress

Report = dict[str, Any]

_ASKED_S = 0.5  # ranks that wait for a save tell each other how far they are


class Saver:
    """Saves one checkpoint at a time. `warn` is told of one that failed where `checkpoint.on_error` is warn.

    `saved` is told of each one that is published, on every rank: its step, the seconds that it took to come about, and
    those that training stood still for it here.
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
        beat: Callable[[], None] = lambda: None,
        states: States = "fp32",
        learned: Collection[str] | None = None,
    ) -> None:
        self._root = root
        self._store = store
        self._tensors = tensors
        self._config_files = config_files
        self._ranks = ranks
        self._settings = settings
        self._warn = warn
        self._saved = saved
        self._beat = beat
        self._states = states
        self._learned = learned
        self._written_bytes = 0
        self._step = 0
        self._best: int | None = None
        self._begun_at = 0.0
        self._stall_s = 0.0
        self._draft: Draft | None = None
        self._live: LiveParts | None = None  # None: drained, rank 0 publishes
        self._work: _Background | None = None

    def start(self, step: int, state: Mapping[str, Any], best: int | None = None) -> None:
        """Begin to save; without `checkpoint.async` also end. Collective. Raises UserError as `poll` does.

        `best`: the step whose checkpoint is kept beside the newest, perhaps this one.
        """
        self.finish()
        self._best = best
        self._step, self._begun_at, self._stall_s = step, time.perf_counter(), 0.0
        with self._standing_still():
            try:
                self._draft = Draft.begin(
                    self._root, step, self._tensors, state, self._config_files, self._ranks, self._states, self._learned
                )
            except UserError as error:
                self._give_up(error)
                return
            self._written_bytes = 0
            draft, live = self._draft, LiveParts(self._store, self._settings.buffer_bytes)
            self._live = live
            self._work = _Background(lambda: draft.write(live, self._count), on_error=live.stop)
        if not self._settings.asynchronous:
            self.finish()

    @property
    def under_way(self) -> int | None:
        """The step whose checkpoint is being saved."""
        return self._step if self._work is not None else None

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
        failed = [(rank, state["error"]) for rank, state in enumerate(states) if state["error"]]
        if failed:
            self._abandon()
            self._give_up(StorageError(f"rank {failed[0][0]}: {failed[0][1]}"))
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
        """Until `arrived`, which takes seconds to wait at most, is true on every rank. Collective.

        A slow disk is not a hang: as long as any rank writes, or its machine has less and less left to write, `beat`
        is called on all of them.
        """
        before: list[tuple[int, int]] = []
        while True:
            own = arrived(_ASKED_S)
            told = self._ranks.gather([own, self._written_bytes, unwritten_bytes()])
            if all(there for there, _, _ in told):
                self._beat()
                return
            now = [(written, left) for _, written, left in told]
            lowest = [min(left, low) for (_, left), (_, low) in zip(now, before or now, strict=True)]
            if any(written > past or left < low for (written, left), (past, low) in zip(now, before, strict=False)):
                self._beat()
            before = [(written, low) for (written, _), low in zip(now, lowest, strict=True)]

    def _count(self, progress: Progress) -> None:
        self._written_bytes = progress.done_bytes

    def _advance(self, draft: Draft, work: _Background) -> None:
        if self._live is None:
            self._draft = self._work = None
            self._saved(self._step, time.perf_counter() - self._begun_at, self._stall_s)
            return
        self._live = None
        pieces: list[list[Piece]] = self._ranks.gather(work.result)
        keep, best = self._settings.keep, self._best
        self._work = _Background(lambda: draft.publish(pieces, keep, best) if self._ranks.rank == 0 else None)

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
        if self._settings.on_error == "stop":
            raise error
        self._warn(f"a checkpoint could not be saved, training goes on: {error}")


class _Background:
    """Something done in a thread: whether it is over, and what came of it."""

    def __init__(self, work: Callable[[], Any], on_error: Callable[[], None] = lambda: None) -> None:
        self.result: Any = None
        self._error: str | None = None
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, args=[work], name="aliquot-saver", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        # Whatever it is, it must reach the training thread, which alone can tell the other ranks.
        except Exception as error:
            self._error = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._on_error()

    def report(self) -> Report:
        return {"done": not self._thread.is_alive(), "error": self._error}

    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
