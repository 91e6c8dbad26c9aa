"""Save checkpoints while training continues: threads write them during the next forward and backward passes.

step-00000100/
  model*.safetensors        fp32 master weights; with config.json and the tokenizer, a Hugging Face model directory
  exp_avg*.safetensors      first moments: fp32, bf16 or int8 codes (see checkpoint_files.py)
  exp_avg_sq*.safetensors   second moments
  state.json                progress of the run
  manifest.json             size and block checksums of all other files, written last

Rank 0 creates the files, every rank writes its shards, and one rename by rank 0 publishes the directory. Ranks learn
the progress of all ranks once per step, by `poll`. In parentheses, the phases that run in threads:

start -> (every rank writes) -> poll: all ranks have written, combine checksums -> (rank 0 publishes) -> poll: published

A save therefore ends one or two steps after its last write.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aliquot.checkpoint.background_task import BackgroundTask, PhasedWork, SaveEvents
from aliquot.checkpoint.checkpoint_files import CheckpointSpec, StoredParts
from aliquot.checkpoint.directories import NAME, STEMS, directory_of
from aliquot.checkpoint.live_parts import CpuCopier, LiveParts
from aliquot.checkpoint.retention import Retention, tidy
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import StorageError, UserError
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.tensor_io.checksums import BlockChecksums, BlockShares
from aliquot.tensor_io.manifest import MANIFEST, STATE, FileRecord, checksum, manifest_bytes
from aliquot.tensor_io.parts import PartSource
from aliquot.tensor_io.publish import (
    begin,
    check_names,
    check_space,
    clean_leftovers,
    commit,
    remove_directory,
    write_file,
)
from aliquot.tensor_io.transfer import Progress, Watch, drain

MAX_FILE_BYTES = 4 << 30

_log = logging.getLogger(__name__)


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
        super().__init__("aliquot-saver", ranks, settings, events)
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
            self._draft = Draft(self._root, step, self._spec, state, self._ranks)
            run_on_rank_0(self._ranks, self._events.check_directory)  # another run may have just replaced the directory
        except UserError as error:
            self._fail(error)
            return
        self._written_bytes = 0
        draft, live = self._draft, LiveParts(self._store, self._settings.buffer_bytes, self._make_copier())
        self._live = live
        self._begin(
            lambda: draft.write(live, self._record_progress), lambda task: self._publish(draft, task), live.stop
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

    def _publish(self, draft: Draft, written: BackgroundTask) -> None:
        self.worked_s += written.seconds
        self._live = None
        shares: BlockShares = written.result.combine(self._ranks)
        retention = Retention(self._settings.keep, self.best, self._events.protected_steps())

        def publish() -> None:
            if self._ranks.rank == 0:
                self._events.check_directory()
                draft.publish(shares, retention)

        self._begin(publish, self._announce)

    def _announce(self, published: BackgroundTask) -> None:
        self.worked_s += published.seconds
        self._draft = self._task = None
        # Time since the start would include an evaluation between the end of the save and this poll.
        self._events.on_saved(self._step, max(self.worked_s, self._stall_s), self._stall_s)

    def _fail(self, error: UserError) -> None:
        """Stop the writes of every rank, let rank 0 remove the partial checkpoint, and raise or warn."""
        if self._live is not None:
            self._live.stop()
        if self._task is not None:
            self._task.join()
            self._ranks.gather(None)
        if self._draft is not None and self._ranks.rank == 0:
            remove_directory(self._draft.partial)
        self._draft = self._live = self._task = None
        # If the run directory was removed or replaced, report that instead of the failed write.
        run_on_rank_0(self._ranks, self._events.check_directory)
        if self._settings.on_error == "stop" or not isinstance(error, StorageError):
            raise error
        self._events.on_failed(self._step)
        self._events.warn(f"a checkpoint could not be saved, training goes on: {error}")


class Draft:
    """A checkpoint that is being written, in a temporary directory next to its final path."""

    def __init__(self, root: Path, step: int, spec: CheckpointSpec, state: Mapping[str, Any], ranks: RankGroup) -> None:
        """Let rank 0 create the temporary directory of `root/step-<step>`, with all files at their sizes. Collective.

        `publish` will replace an existing checkpoint of the same step. `state` is any JSON object; rank 0 writes its
        own. Raises the same UserError on every rank.
        """
        self.target = directory_of(root, step)
        self._root = root
        self._layouts = {kind: spec.layout(kind, stem, MAX_FILE_BYTES) for kind, stem in STEMS.items()}
        self._files = {file.name: file for layout in self._layouts.values() for file in layout.files}
        self._sizes = {name: file.file_bytes for name, file in self._files.items()}
        self._small_files = {STATE: json.dumps(state, indent=1).encode(), **spec.config_files}
        self._config_names = sorted(spec.config_files)
        run_on_rank_0(ranks, lambda: clean_leftovers(root, NAME))
        self.partial = begin(self.target, ranks, self._prepare)

    def write(self, store: PartSource, watch: Watch | None = None) -> BlockShares:
        """Write and fsync the shards of this rank; return their share of the checksums. Raises UserError."""
        checksums = BlockChecksums()
        entries = {kind: layout.byte_map(self.partial).entries for kind, layout in self._layouts.items()}
        drain(StoredParts(store, entries), entries, checksums, watch)
        return checksums.shares(self._sizes)

    def publish(self, written: BlockShares, retention: Retention) -> None:
        """Write the manifest, rename the directory, then remove old checkpoints. Call on rank 0, after all ranks wrote.

        `written` are the checksums of the shards of all ranks. Raises OSError if the checkpoint could not be
        published; an existing checkpoint of the same step is then unchanged.
        """
        write_file(self.partial / MANIFEST, self._manifest(written))
        commit(self.partial, self.target, replace=True)
        try:
            tidy(self._root, self.target, retention)
        except OSError as error:  # the checkpoint is saved; the next save tries to remove the leftovers again
            _log.warning("leftovers of earlier saves could not be removed: %s", error)

    def _prepare(self, partial: Path) -> None:
        check_names(self._config_names, taken={STATE, MANIFEST})
        check_space(partial, sum(self._sizes.values()))
        for layout in self._layouts.values():
            layout.create_files(partial)
        for name, data in self._small_files.items():
            write_file(partial / name, data)

    def _manifest(self, written: BlockShares) -> bytes:
        header_bytes = {self.partial / name: len(file.header) for name, file in self._files.items()}
        blocks = written.with_headers(header_bytes).blocks()
        records = {name: FileRecord(bytes=size, crc32=blocks[name]) for name, size in self._sizes.items()}
        for layout in self._layouts.values():
            records |= {name: checksum(data) for name, data in layout.index.items()}
        records |= {name: checksum(data) for name, data in self._small_files.items()}
        return manifest_bytes(records, self._config_names)
