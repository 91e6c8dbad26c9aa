"""`checkpoint.mirror`: upload the checkpoints of a run to a store while training continues, and fetch them to resume.

An upload consists of phases (see PhasedWork), of which those in parentheses run in threads:

start -> (rank 0 prepares) -> poll: share the upload tokens -> (all ranks send) -> poll: gather the receipts
-> (rank 0 publishes) -> poll

A checkpoint that is saved during an upload waits for the end of the upload. Of several waiting checkpoints only the
newest and the best are uploaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from aliquot.checkpoint.background_task import BackgroundTask, PhasedWork, SaveEvents
from aliquot.checkpoint.directories import directory_of, newest, step_of
from aliquot.checkpoint.remote_checkpoint import Receipt, Upload, complete_steps, fetch, split_url
from aliquot.checkpoint.retention import Retention, name_best, retain
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import DamagedCheckpoint, ResumeError, StorageError, UserError
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.stores.store import is_url, open_store

_log = logging.getLogger(__name__)


class Uploader(PhasedWork):
    """Uploads one checkpoint at a time to the store at `url`; without a URL, uploads nothing."""

    def __init__(
        self, url: str | None, root: Path, ranks: RankGroup, settings: CheckpointSection, events: SaveEvents
    ) -> None:
        super().__init__("aliquot-mirror", ranks, settings, events)
        self._url = url
        self._root = root
        self._step: int | None = None
        self._best: int | None = None
        self._waiting: list[int] = []  # steps of checkpoints to upload next
        self._just_saved: set[int] = set()  # steps whose checkpoints replace an older copy in the store
        self._upload: Upload | None = None
        self._started_at = 0.0

    @property
    def protected_steps(self) -> list[int]:
        """Return the steps of checkpoints that are being uploaded or wait for it; retention must not remove them."""
        return [*([] if self._step is None else [self._step]), *self._waiting]

    def start(self, step: int, best: int | None = None, just_saved: bool = False) -> None:
        """Begin to upload the complete checkpoint of `step`, or queue it. Every rank must call `start`.

        Args:
            best: the step that evaluated best; retention never removes the checkpoint of this step.
            just_saved: whether this run has just saved the checkpoint. The upload then replaces a copy in the store,
                even a copy with the same manifest: the run skipped that copy when it resumed, perhaps because the copy
                is damaged. Manifests are equal because a run repeats its steps bit for bit.
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
        url = self._url

        def prepare() -> tuple[Upload, dict[str, str] | None]:
            upload = Upload(directory_of(self._root, step), open_store(url), self._ranks)
            if self._ranks.rank > 0:
                return upload, None
            self._events.check_directory()
            return upload, upload.prepare(replace=step in self._just_saved)

        self._begin(prepare, self._send)

    def _send(self, prepared: BackgroundTask) -> None:
        upload, rank_0_tokens = prepared.result
        self._upload, tokens = upload, self._ranks.gather(rank_0_tokens)[0]
        if tokens is None:  # the store has this checkpoint
            self._end()
        else:
            self._begin(lambda: upload.send(tokens), lambda task: self._publish(upload, tokens, task.result))

    def _publish(self, upload: Upload, tokens: dict[str, str], receipts: list[Receipt]) -> None:
        sent: list[Receipt] = [tuple(receipt) for rank in self._ranks.gather(receipts) for receipt in rank]
        retention = Retention(self._settings.keep, self._best)

        def publish() -> None:
            if self._ranks.rank == 0:
                self._events.check_directory()
                upload.publish(tokens, sent, retention)

        self._begin(publish, self._announce)

    def _announce(self, _: BackgroundTask) -> None:
        seconds = time.perf_counter() - self._started_at
        self._events.inform(f"checkpoint: step {self._step} is in {self._url}, copied in {seconds:.1f} s")
        self._end()

    def _done_bytes(self) -> int:
        return self._upload.sent_bytes if self._upload is not None else 0

    def _end(self) -> None:
        """Apply retention, which had to keep the uploaded checkpoint, and begin the next upload."""
        self._task = self._upload = self._step = None
        if self._ranks.rank == 0:
            try:
                retain(self._root, None, Retention(self._settings.keep, self._best, self.protected_steps))
            except OSError as error:  # the end of the next upload tries again
                _log.warning("leftovers of earlier saves could not be removed: %s", error)
        if self._waiting:
            self.start(self._waiting.pop(0), self._best)

    def _fail(self, error: UserError) -> None:
        """Raise or warn. The partial copy in the store has no manifest, and the next upload removes it."""
        if self._upload is not None:
            self._upload.stop()
        # If the run directory was removed or replaced, report that instead of the failed upload.
        run_on_rank_0(self._ranks, self._events.check_directory)
        message = f"checkpoint.mirror: step {self._step} could not be copied, the local checkpoint is complete: {error}"
        if self._settings.on_error == "stop" or not isinstance(error, StorageError):
            self._waiting = []  # a run that ends begins no further upload
            self._end()
            raise type(error)(message)
        self._end()
        self._events.warn(message)


def fetch_newer(
    settings: CheckpointSection, mirror: str | None, root: Path, ranks: RankGroup, warn: Callable[[str], None]
) -> None:
    """Fetch a checkpoint to `root` if the mirror has a newer one than `root`. Collective.

    If neither `root` nor the mirror has a checkpoint, fetch the one at the URL in `checkpoint.resume`, if it is a URL.

    Raises UserError if `resume` is never, but the mirror holds checkpoints. Raises UserError if all checkpoints of the
    mirror and the URL are damaged. Raises UserError if the mirror cannot be reached, unless `root` holds a checkpoint
    and `checkpoint.on_error` is warn.
    """

    def find_newer() -> list[list[str]]:
        latest, names = newest(root), []
        try:
            names = complete_steps(open_store(mirror)) if mirror is not None else []
        except StorageError as error:
            if latest is None or settings.on_error == "stop":
                raise StorageError(f"checkpoint.mirror: {error}") from None
            warn(f"checkpoint.mirror: {error}; resuming from {latest}")
        if names and settings.resume == "never":
            raise ResumeError(
                f"checkpoint.resume is `never`, and {mirror} holds {names[-1]}; choose another run.name, or resume:"
                " auto"
            )
        newer = [[mirror or "", name] for name in names if latest is None or step_of(Path(name)) > step_of(latest)]
        if latest is None and not newer and is_url(settings.resume):
            return [list(split_url(settings.resume))]
        return newer

    candidates = run_on_rank_0(ranks, find_newer)
    found_damage = False
    for url, folder in reversed(candidates):
        try:
            fetch(url, folder, root, ranks)
            return
        except StorageError as error:
            if settings.on_error == "stop" or run_on_rank_0(ranks, lambda: newest(root) is None):
                raise
            warn(f"checkpoint.mirror: {error}; resuming from the local checkpoints")
            return
        except DamagedCheckpoint as error:
            if is_url(settings.resume) and [url, folder] == candidates[0]:
                raise
            warn(f"skipping a damaged checkpoint: {url}: {error}")
            found_damage = True
    if found_damage and settings.resume == "auto" and run_on_rank_0(ranks, lambda: newest(root) is None):
        raise ResumeError(
            f"no checkpoint in {mirror} is complete and undamaged: choose another run.name to start from scratch, or a"
            " checkpoint.resume: PATH"
        )


def fetch_replacement(
    settings: CheckpointSection, mirror: str | None, damaged: Path, ranks: RankGroup, warn: Callable[[str], None]
) -> Path | None:
    """Fetch a replacement for the local checkpoint `damaged` from the mirror. Collective.

    The replacement is the mirror's newest undamaged checkpoint of the same step or an earlier one. It must be newer
    than the complete local checkpoints before `damaged`.

    Returns the fetched checkpoint; None if the mirror has no replacement. Raises UserError if the mirror cannot be
    reached and `checkpoint.on_error` is stop.
    """
    if mirror is None:
        return None
    root, last_step = damaged.parent, step_of(damaged)

    def find_candidates() -> list[str]:
        before = newest(root, last_step)
        first_step = -1 if before is None else step_of(before)
        return [name for name in complete_steps(open_store(mirror)) if first_step < step_of(Path(name)) <= last_step]

    try:
        for folder in reversed(run_on_rank_0(ranks, find_candidates)):
            try:
                fetched = fetch(mirror, folder, root, ranks)
                warn(f"{mirror}/{folder} replaces the damaged checkpoint")
                return fetched
            except DamagedCheckpoint as error:
                warn(f"skipping a damaged checkpoint: {mirror}: {error}")
    except StorageError as error:
        if settings.on_error == "stop":
            raise StorageError(f"checkpoint.mirror: {error}") from None
        warn(f"checkpoint.mirror: {error}; resuming from the local checkpoints")
    return None


def fetch_best(mirror: str | None, best: Path, ranks: RankGroup, warn: Callable[[str], None]) -> bool:
    """Fetch the checkpoint that evaluated best, which is missing locally; return whether it was fetched. Collective."""
    if mirror is None:
        return False
    try:
        if not run_on_rank_0(ranks, lambda: best.name in complete_steps(open_store(mirror))):
            return False
        fetch(mirror, best.name, best.parent, ranks)
    except (DamagedCheckpoint, StorageError) as error:
        warn(f"the best checkpoint could not be fetched: {mirror}: {error}")
        return False
    run_on_rank_0(ranks, lambda: name_best(best.parent, step_of(best)))
    return True
