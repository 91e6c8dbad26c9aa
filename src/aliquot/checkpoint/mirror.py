"""Checkpoints are copied to a store beside training: `checkpoint.mirror`.

As in background_saver.py, threads do the work and the training thread alone lets ranks hear of each other:

start -> (prepare on rank 0) -> poll: tokens told -> (send) -> poll: receipts gathered -> (publish on rank 0) -> poll

A checkpoint that comes while another is being copied waits; of several that wait the newest and the best are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aliquot.checkpoint.background import Background, Report, failure, wait_together
from aliquot.checkpoint.directories import directory_of, newest, retain
from aliquot.checkpoint.remote_checkpoint import Copy
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import StorageError, UserError
from aliquot.core.on_rank_0 import RankGroup, on_first
from aliquot.stores.open_store import open_store

_log = logging.getLogger(__name__)


class Mirror:
    """Without a `url` nothing is copied. `told` is told of each copy that is complete, `warn` of one that failed where
    `checkpoint.on_error` is warn. `may_publish` raises UserError on rank 0 where `root` is not this run's any more."""

    def __init__(
        self,
        url: str | None,
        root: Path,
        ranks: RankGroup,
        settings: CheckpointSection,
        told: Callable[[str], None],
        warn: Callable[[str], None],
        beat: Callable[[], None] = lambda: None,
        may_publish: Callable[[], None] = lambda: None,
    ) -> None:
        self._may_publish = may_publish
        self._url = url
        self._root = root
        self._ranks = ranks
        self._settings = settings
        self._told = told
        self._warn = warn
        self._beat = beat
        self._step: int | None = None
        self._best: int | None = None
        self._waiting: list[int] = []
        self._new: set[int] = set()  # steps of which the store may have an earlier copy
        self._copy: Copy | None = None
        self._work: Background | None = None
        self._go_on: Callable[[], bool] = lambda: False
        self._begun_at = 0.0

    @property
    def needed(self) -> list[int]:
        """The steps of checkpoints that are being copied or wait for it, and must not be removed."""
        return [*([] if self._step is None else [self._step]), *self._waiting]

    def start(self, step: int, best: int | None = None, new: bool = False) -> None:
        """Copy the checkpoint of `step`, which is complete; that of `best` is kept beside the newest. Every rank calls
        it.

        `new`: it has just been saved. What the store has of that step was passed over when the run began, being damaged
        perhaps, and is replaced: a run repeats its steps bit for bit, so the same manifest says nothing."""
        if self._url is None:
            return
        self._best = best
        if new:
            self._new.add(step)
        if self._work is not None:
            self._waiting = [each for each in self._waiting if each == best] + [step]
            return
        self._step, self._begun_at = step, time.perf_counter()
        self._go_on = self._sending
        self._work = Background("aliquot-mirror", lambda: self._prepare(step))

    def report(self) -> Report | None:
        """Where this rank stands, for the reports that `poll` takes; None: nothing is being copied."""
        return self._work.report() if self._work is not None else None

    def poll(self, reports: Sequence[Report | None]) -> None:
        """Go on as far as all ranks have come. Collective, with the reports of all ranks gathered at one moment.

        Raises the same UserError on every rank where a rank could not copy and `checkpoint.on_error` is stop.
        """
        states = [report for report in reports if report is not None]
        if not states:
            return
        if (failed := failure(states)) is not None:
            self._give_up(failed)
        elif all(state["done"] for state in states) and not self._go_on():
            self._over()

    def finish(self) -> None:
        """Wait for the copies that are under way and waiting. Collective."""
        while (work := self._work) is not None:
            wait_together(self._ranks, work.join, lambda: self._copy.sent_bytes if self._copy else 0, self._beat)
            self.poll(self._ranks.gather(self.report()))

    def _prepare(self, step: int) -> Any:
        assert self._url is not None
        if self._ranks.rank == 0:
            self._may_publish()
        store = open_store(self._url)
        copy = Copy(directory_of(self._root, step), store, self._ranks.rank, self._ranks.world_size)
        return copy, copy.prepare(anew=step in self._new) if self._ranks.rank == 0 else None

    # What comes next, once all ranks have done what came before; False: it is over. Collective.

    def _sending(self) -> bool:
        copy, own = self._done()
        self._copy, tokens = copy, self._ranks.gather(own)[0]
        if tokens is None:
            return False
        self._go_on = lambda: self._publishing(copy, tokens)
        self._work = Background("aliquot-mirror", lambda: copy.send(tokens))
        return True

    def _publishing(self, copy: Copy, tokens: dict[str, str]) -> bool:
        sent = [tuple(each) for of_rank in self._ranks.gather(self._done()) for each in of_rank]
        keep, best = self._settings.keep, self._best
        self._go_on = self._published

        def publish() -> None:
            if self._ranks.rank == 0:
                self._may_publish()
                copy.publish(tokens, sent, keep, best)

        self._work = Background("aliquot-mirror", publish)
        return True

    def _published(self) -> bool:
        self._told(
            f"checkpoint: step {self._step} is in {self._url}, copied in {time.perf_counter() - self._begun_at:.1f} s"
        )
        return False

    def _done(self) -> Any:
        assert self._work is not None
        return self._work.result

    def _over(self) -> None:
        self._work = self._copy = self._step = None
        if self._ranks.rank == 0:
            try:
                if (last := newest(self._root)) is not None:  # without the one that was copied
                    retain(self._root, self._settings.keep, last, {self._best, *self.needed})
            except OSError as error:  # the next copy tidies again
                _log.warning("what earlier saves left could not be removed: %s", error)
        if self._waiting:
            self.start(self._waiting.pop(0), self._best)

    def _give_up(self, error: UserError) -> None:
        """What has been sent looks incomplete, and the next copy removes it. Collective."""
        if self._copy is not None:
            self._copy.stop()
        on_first(self._ranks, self._may_publish)  # in a directory that is gone every read fails
        text = f"checkpoint.mirror: step {self._step} could not be copied, the checkpoint here is good: {error}"
        if self._settings.on_error == "stop" or not isinstance(error, StorageError):
            self._waiting = []  # no other copy is begun by a run that ends
            self._over()
            raise type(error)(text)
        self._over()
        self._warn(text)
