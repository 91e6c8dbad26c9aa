"""Upload checkpoints to a store while training continues: `checkpoint.mirror`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aliquot.checkpoint.background_task import Background, Report, failure, wait_together
from aliquot.checkpoint.directories import directory_of, is_name, newest, retain
from aliquot.checkpoint.remote_files import Range, checked, complete_steps, in_threads, ranges_of, share_of
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import StorageError, TrainingError, UserError
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.stores.base import Store
from aliquot.stores.open_store import open_store
from aliquot.tensor_io.checksums import BLOCK_BYTES
from aliquot.tensor_io.manifest import MANIFEST, Manifest, read_manifest

_log = logging.getLogger(__name__)


class Copy:
    """A checkpoint on its way to a store: `prepare` on rank 0, `send` on every rank, `publish` on rank 0."""

    def __init__(self, directory: Path, store: Store, rank: int, world_size: int) -> None:
        self._directory = directory
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._stopped = False
        self.sent_bytes = 0

    def prepare(self, anew: bool = False) -> dict[str, str] | None:
        """Remove what killed processes left, and begin; a token a file. None: the store has this checkpoint, unless it
        is to be copied `anew`."""
        store, folder = self._store, self._directory.name
        there = store.list()
        if not anew and self._has(there):
            return None
        store.abort()
        complete = {name.partition("/")[0] for name in there if name.endswith(f"/{MANIFEST}")} - {folder}
        _remove(store, (name for name in there if _folder(name) and _folder(name) not in complete))
        files = read_manifest(self._directory).files
        return {name: store.begin(f"{folder}/{name}", record.bytes) for name, record in files.items()}

    def _has(self, there: Mapping[str, int]) -> bool:
        """Whether the store, with files of such sizes, has the same manifest, and every file as large as that says."""
        folder, manifest = self._directory.name, (self._directory / MANIFEST).read_bytes()
        sizes = {name: record.bytes for name, record in read_manifest(self._directory).files.items()}
        sizes[MANIFEST] = len(manifest)
        if any(there.get(f"{folder}/{name}") != size for name, size in sizes.items()):
            return False
        return self._store.read(f"{folder}/{MANIFEST}", 0, len(manifest)) == manifest

    def send(self, tokens: Mapping[str, str]) -> list[tuple[str, int, str]]:
        """Copy this rank's ranges: name, part and receipt of each."""
        manifest = read_manifest(self._directory)
        own = share_of(ranges_of(manifest, manifest.files, self._store.part_bytes), self._rank, self._world_size)

        def send(part: Range) -> tuple[str, int, str]:
            name = f"{self._directory.name}/{part.name}"
            blocks = self._blocks(manifest, part)
            receipt = self._store.put_part(name, tokens[part.name], part.index, part.start, blocks)
            if not self._store.compares:
                for start in range(part.start, part.stop, BLOCK_BYTES):
                    checked(self._store.read(name, start, min(start + BLOCK_BYTES, part.stop)), manifest, part, start)
            return part.name, part.index, receipt

        return in_threads(send, own)

    def publish(
        self, tokens: Mapping[str, str], sent: Sequence[tuple[str, int, str]], keep: int, best: int | None = None
    ) -> None:
        """All ranks have sent theirs: complete the files, look at them, write the manifest; then retention, from which
        the checkpoint of step `best` is exempt."""
        store, folder = self._store, self._directory.name
        manifest = read_manifest(self._directory)
        receipts: dict[str, list[tuple[int, str]]] = {name: [] for name in tokens}
        for name, index, receipt in sent:
            receipts[name].append((index, receipt))
        for name, token in tokens.items():
            store.complete(f"{folder}/{name}", token, [receipt for _, receipt in sorted(receipts[name])])
        there = store.list()
        for name, record in manifest.files.items():
            if (found := there.get(f"{folder}/{name}")) != record.bytes:
                raise StorageError(f"{folder}/{name} has {found} bytes there instead of {record.bytes}")
        store.put(f"{folder}/{MANIFEST}", (self._directory / MANIFEST).read_bytes())
        kept = {folder, *(directory_of(Path(), step).name for step in (best,) if step is not None)}
        old = set(complete_steps(store)[:-keep]) - kept
        _remove(store, (name for name in there if _folder(name) in old))

    def stop(self) -> None:
        """Nothing more need be sent."""
        self._stopped = True

    def _blocks(self, manifest: Manifest, part: Range) -> Iterator[bytes]:
        path = self._directory / part.name
        with path.open("rb", buffering=0) as file:
            for start in range(part.start, part.stop, BLOCK_BYTES):
                if self._stopped:
                    raise TrainingError("this copy was given up")
                data = os.pread(file.fileno(), min(BLOCK_BYTES, part.stop - start), start)
                yield checked(data, manifest, part, start)
                self.sent_bytes += len(data)


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
        run_on_rank_0(self._ranks, self._may_publish)  # in a directory that is gone every read fails
        text = f"checkpoint.mirror: step {self._step} could not be copied, the checkpoint here is good: {error}"
        if self._settings.on_error == "stop" or not isinstance(error, StorageError):
            self._waiting = []  # no other copy is begun by a run that ends
            self._over()
            raise type(error)(text)
        self._over()
        self._warn(text)


def _folder(name: str) -> str | None:
    """The checkpoint that a file belongs to; None: it is not of one, and not ours."""
    folder, slash, _ = name.partition("/")
    return folder if slash and is_name(folder) else None


def _remove(store: Store, names: Iterator[str]) -> None:
    """Manifests first, in a request of their own: what has none is no checkpoint."""
    every = list(names)
    manifests = [name for name in every if name.endswith(f"/{MANIFEST}")]
    store.remove(manifests)
    store.remove([name for name in every if name not in set(manifests)])
