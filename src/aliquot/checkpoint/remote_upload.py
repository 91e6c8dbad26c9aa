"""Upload checkpoints to a store while training continues: `checkpoint.mirror`.

As in background_saver.py, threads do the work, and only the training thread exchanges messages between ranks:

start -> (rank 0 prepares) -> poll: share the upload tokens -> (all ranks send) -> poll: gather the receipts
-> (rank 0 publishes) -> poll

A checkpoint that is saved during an upload waits. Of several waiting checkpoints only the newest and the best remain.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aliquot.checkpoint.background_task import (
    BackgroundTask,
    SaveEvents,
    TaskReport,
    first_failure,
    wait_on_all_ranks,
)
from aliquot.checkpoint.directories import directory_of, is_name, newest
from aliquot.checkpoint.remote_files import (
    FileRange,
    complete_steps,
    share_of_rank,
    split_files,
    transfer_in_threads,
    verified_block,
)
from aliquot.checkpoint.retention import Retention, retain
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import StorageError, TrainingError, UserError
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.stores.store import Store, open_store
from aliquot.tensor_io.checksums import BLOCK_BYTES
from aliquot.tensor_io.manifest import MANIFEST, Manifest, read_manifest

Receipt = tuple[str, int, str]  # file name, number of the range, the store's receipt

_log = logging.getLogger(__name__)


class Upload:
    """The upload of one checkpoint: `prepare` on rank 0, `send` on every rank, `publish` on rank 0."""

    def __init__(self, directory: Path, store: Store, rank: int, world_size: int) -> None:
        self._directory = directory
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._stopped = False
        self.sent_bytes = 0

    def prepare(self, replace: bool = False) -> dict[str, str] | None:
        """Remove what killed processes left and begin the upload of every file.

        Returns:
            A token for each file; None if the store has this checkpoint and it is not to be replaced.
        """
        store, folder = self._store, self._directory.name
        sizes = store.list()
        if not replace and self._has_checkpoint(sizes):
            return None
        store.abort()
        complete = {name.partition("/")[0] for name in sizes if name.endswith(f"/{MANIFEST}")} - {folder}
        _remove(store, (name for name in sizes if _folder(name) and _folder(name) not in complete))
        files = read_manifest(self._directory).files
        return {name: store.begin(f"{folder}/{name}", record.bytes) for name, record in files.items()}

    def _has_checkpoint(self, stored_bytes: Mapping[str, int]) -> bool:
        """Return whether the store has the same manifest and every file at its recorded size."""
        folder, manifest = self._directory.name, (self._directory / MANIFEST).read_bytes()
        sizes = {name: record.bytes for name, record in read_manifest(self._directory).files.items()}
        sizes[MANIFEST] = len(manifest)
        if any(stored_bytes.get(f"{folder}/{name}") != size for name, size in sizes.items()):
            return False
        return self._store.read(f"{folder}/{MANIFEST}", 0, len(manifest)) == manifest

    def send(self, tokens: Mapping[str, str]) -> list[Receipt]:
        """Send this rank's ranges and return the receipts."""
        manifest = read_manifest(self._directory)
        ranges = split_files(manifest, manifest.files, self._store.part_bytes)

        def send_range(item: FileRange) -> Receipt:
            name = f"{self._directory.name}/{item.name}"
            blocks = self._blocks(manifest, item)
            receipt = self._store.put_part(name, tokens[item.name], item.index, item.start, blocks)
            if not self._store.verifies_checksums:
                for start in range(item.start, item.stop, BLOCK_BYTES):
                    data = self._store.read(name, start, min(start + BLOCK_BYTES, item.stop))
                    verified_block(data, manifest, item, start)
            return item.name, item.index, receipt

        return transfer_in_threads(send_range, share_of_rank(ranges, self._rank, self._world_size))

    def publish(self, tokens: Mapping[str, str], sent: Sequence[Receipt], retention: Retention) -> None:
        """Complete the files, check their sizes, write the manifest, then remove old checkpoints of the store.

        Args:
            sent: the receipts of all ranks.
        """
        store, folder = self._store, self._directory.name
        manifest = read_manifest(self._directory)
        receipts: dict[str, list[tuple[int, str]]] = {name: [] for name in tokens}
        for name, index, receipt in sent:
            receipts[name].append((index, receipt))
        for name, token in tokens.items():
            store.complete(f"{folder}/{name}", token, [receipt for _, receipt in sorted(receipts[name])])
        sizes = store.list()
        for name, record in manifest.files.items():
            if (size := sizes.get(f"{folder}/{name}")) != record.bytes:
                raise StorageError(f"{folder}/{name} has {size} bytes there instead of {record.bytes}")
        store.put(f"{folder}/{MANIFEST}", (self._directory / MANIFEST).read_bytes())
        retained = {folder} if retention.best is None else {folder, directory_of(Path(), retention.best).name}
        old = set(complete_steps(store)[: -retention.keep]) - retained
        _remove(store, (name for name in sizes if _folder(name) in old))

    def stop(self) -> None:
        """End `send` at its next block."""
        self._stopped = True

    def _blocks(self, manifest: Manifest, item: FileRange) -> Iterator[bytes]:
        path = self._directory / item.name
        with path.open("rb", buffering=0) as file:
            for start in range(item.start, item.stop, BLOCK_BYTES):
                if self._stopped:
                    raise TrainingError("this upload was abandoned")
                data = os.pread(file.fileno(), min(BLOCK_BYTES, item.stop - start), start)
                yield verified_block(data, manifest, item, start)
                self.sent_bytes += len(data)


class Uploader:
    """Uploads one checkpoint at a time to the store at `url`; None: uploads nothing."""

    def __init__(
        self, url: str | None, root: Path, ranks: RankGroup, settings: CheckpointSection, events: SaveEvents
    ) -> None:
        self._url = url
        self._root = root
        self._ranks = ranks
        self._settings = settings
        self._events = events
        self._step: int | None = None
        self._best: int | None = None
        self._waiting: list[int] = []
        self._just_saved: set[int] = set()  # steps of which the store may have an older copy
        self._upload: Upload | None = None
        self._task: BackgroundTask | None = None
        self._next_phase: Callable[[], bool] = lambda: False
        self._started_at = 0.0

    @property
    def protected_steps(self) -> list[int]:
        """The steps of checkpoints that are uploaded now or wait for it: retention must not remove them."""
        return [*([] if self._step is None else [self._step]), *self._waiting]

    def start(self, step: int, best: int | None = None, just_saved: bool = False) -> None:
        """Upload the complete checkpoint of `step`. Every rank calls it.

        Args:
            best: the step that retention keeps in addition to the newest ones.
            just_saved: replace the copy in the store, even one with the same manifest. The run skipped that copy when
                it began, perhaps because it is damaged; a run repeats its steps bit for bit, so manifests are equal.
        """
        if self._url is None:
            return
        self._best = best
        if just_saved:
            self._just_saved.add(step)
        if self._task is not None:
            self._waiting = [waiting for waiting in self._waiting if waiting == best] + [step]
            return
        self._step, self._started_at = step, time.perf_counter()
        self._next_phase = self._send
        self._task = BackgroundTask("aliquot-mirror", lambda: self._prepare(step))

    def report(self) -> TaskReport | None:
        """Return the progress of this rank, which `poll` takes from all ranks; None if no upload is in progress."""
        return self._task.report() if self._task is not None else None

    def poll(self, reports: Sequence[TaskReport | None]) -> None:
        """Begin the next phase of the upload if all ranks are ready. Collective, with the reports of all ranks gathered
        at one moment.

        Raises the same UserError on every rank if a rank could not upload and `checkpoint.on_error` is stop.
        """
        states = [report for report in reports if report is not None]
        if not states:
            return
        if (error := first_failure(states)) is not None:
            self._fail(error)
        elif all(state["done"] for state in states) and not self._next_phase():
            self._end()

    def finish(self) -> None:
        """Wait for the current upload and for all waiting ones. Collective."""
        while (task := self._task) is not None:
            wait_on_all_ranks(
                self._ranks, task.join, lambda: self._upload.sent_bytes if self._upload else 0, self._events.heartbeat
            )
            self.poll(self._ranks.gather(self.report()))

    def _prepare(self, step: int) -> Any:
        assert self._url is not None
        if self._ranks.rank == 0:
            self._events.check_directory()
        store = open_store(self._url)
        upload = Upload(directory_of(self._root, step), store, self._ranks.rank, self._ranks.world_size)
        return upload, upload.prepare(replace=step in self._just_saved) if self._ranks.rank == 0 else None

    # Each phase begins after all ranks have ended the one before; it returns False after the last. Collective.

    def _send(self) -> bool:
        upload, rank_0_tokens = self._result()
        self._upload, tokens = upload, self._ranks.gather(rank_0_tokens)[0]
        if tokens is None:
            return False
        self._next_phase = lambda: self._publish(upload, tokens)
        self._task = BackgroundTask("aliquot-mirror", lambda: upload.send(tokens))
        return True

    def _publish(self, upload: Upload, tokens: dict[str, str]) -> bool:
        sent: list[Receipt] = [tuple(receipt) for rank in self._ranks.gather(self._result()) for receipt in rank]
        retention = Retention(self._settings.keep, self._best)
        self._next_phase = self._announce

        def publish() -> None:
            if self._ranks.rank == 0:
                self._events.check_directory()
                upload.publish(tokens, sent, retention)

        self._task = BackgroundTask("aliquot-mirror", publish)
        return True

    def _announce(self) -> bool:
        seconds = time.perf_counter() - self._started_at
        self._events.inform(f"checkpoint: step {self._step} is in {self._url}, copied in {seconds:.1f} s")
        return False

    def _result(self) -> Any:
        assert self._task is not None
        return self._task.result

    def _end(self) -> None:
        """Apply the retention that the upload held back, and begin the next upload."""
        self._task = self._upload = self._step = None
        if self._ranks.rank == 0:
            try:
                if (last := newest(self._root)) is not None:
                    retain(self._root, self._settings.keep, last, {self._best, *self.protected_steps})
            except OSError as error:  # the next upload tidies again
                _log.warning("leftovers of earlier saves could not be removed: %s", error)
        if self._waiting:
            self.start(self._waiting.pop(0), self._best)

    def _fail(self, error: UserError) -> None:
        """Raise or warn, by `checkpoint.on_error`. The partial copy has no manifest, and the next upload removes it.
        Collective."""
        if self._upload is not None:
            self._upload.stop()
        run_on_rank_0(self._ranks, self._events.check_directory)  # in a directory that was removed every read fails
        message = f"checkpoint.mirror: step {self._step} could not be copied, the checkpoint here is good: {error}"
        if self._settings.on_error == "stop" or not isinstance(error, StorageError):
            self._waiting = []  # a run that ends begins no further upload
            self._end()
            raise type(error)(message)
        self._end()
        self._events.warn(message)


def _folder(name: str) -> str | None:
    """Return the checkpoint to which a file belongs; None for files of somebody else."""
    folder, slash, _ = name.partition("/")
    return folder if slash and is_name(folder) else None


def _remove(store: Store, names: Iterator[str]) -> None:
    """Remove manifests first, in a request of their own, so that no partial checkpoint has a manifest."""
    all_names = list(names)
    manifests = [name for name in all_names if name.endswith(f"/{MANIFEST}")]
    store.remove(manifests)
    store.remove([name for name in all_names if name not in set(manifests)])
