"""Save a checkpoint: rank 0 creates the files, every rank writes its shards, and one rename publishes the directory.

step-00000100/
  model*.safetensors        fp32 master weights; with config.json and the tokenizer, a Hugging Face model directory
  exp_avg*.safetensors      first moments: fp32, bf16 or int8 codes (see checkpoint_files.py)
  exp_avg_sq*.safetensors   second moments
  state.json                progress of the run
  manifest.json             size and block checksums of all other files, written last
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from aliquot.checkpoint.checkpoint_files import CheckpointSpec, StoredParts
from aliquot.checkpoint.directories import NAME, STATE, STEMS, directory_of
from aliquot.checkpoint.retention import Retention, tidy
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.tensor_io.checksums import BlockChecksums, Piece, combine_pieces
from aliquot.tensor_io.manifest import MANIFEST, FileRecord, checksum, manifest_bytes
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
from aliquot.tensor_io.transfer import Watch, drain

MAX_FILE_BYTES = 4 << 30

_log = logging.getLogger(__name__)


class Draft:
    """A checkpoint that is being written, in a temporary directory next to its final path."""

    def __init__(self, root: Path, step: int, spec: CheckpointSpec, state: Mapping[str, Any]) -> None:
        self.target = directory_of(root, step)
        self.partial = Path()
        self._root = root
        self._layouts = {kind: spec.layout(kind, stem, MAX_FILE_BYTES) for kind, stem in STEMS.items()}
        self._files = {file.name: file for layout in self._layouts.values() for file in layout.files}
        self._small_files = {STATE: json.dumps(state, indent=1).encode(), **spec.config_files}
        self._config_names = sorted(spec.config_files)

    @classmethod
    def begin(cls, root: Path, step: int, spec: CheckpointSpec, state: Mapping[str, Any], ranks: RankGroup) -> Draft:
        """Let rank 0 create the temporary directory of `root/step-<step>`, with all files at their sizes. Collective.

        `publish` will replace an existing checkpoint of the same step. `state` is any JSON object; rank 0 writes its
        own. Raises the same UserError on every rank.
        """
        draft = cls(root, step, spec, state)
        run_on_rank_0(ranks, lambda: clean_leftovers(root, NAME))
        draft.partial = begin(draft.target, ranks, draft._prepare)
        return draft

    def write(self, store: PartSource, watch: Watch | None = None) -> list[Piece]:
        """Write and fsync the shards of this rank; return their checksums for `publish`. Raises UserError."""
        checksums = BlockChecksums()
        entries = {kind: layout.byte_map(self.partial).entries for kind, layout in self._layouts.items()}
        drain(StoredParts(store, entries), entries, checksums, watch)
        return checksums.pieces()

    def publish(self, written: Sequence[Sequence[Piece]], retention: Retention) -> None:
        """Write the manifest, rename the directory, then remove old checkpoints. Call on rank 0, after all ranks wrote.

        `written` are the checksums of all ranks. Raises OSError if the checkpoint could not be published; an existing
        checkpoint of the same step is then unchanged.
        """
        write_file(self.partial / MANIFEST, self._manifest(written))
        commit(self.partial, self.target, replace=True)
        try:
            tidy(self._root, self.target, retention)
        except OSError as error:  # the checkpoint is saved; the next save tries to remove the leftovers again
            _log.warning("leftovers of earlier saves could not be removed: %s", error)

    def abandon(self) -> None:
        """Remove the temporary directory. Call on rank 0, after the last write of any rank."""
        remove_directory(self.partial)

    def _prepare(self, partial: Path) -> None:
        check_names(self._config_names, taken={STATE, MANIFEST})
        check_space(partial, sum(file.file_bytes for file in self._files.values()))
        for layout in self._layouts.values():
            layout.create_files(partial)
        for name, data in self._small_files.items():
            write_file(partial / name, data)

    def _manifest(self, written: Sequence[Sequence[Piece]]) -> bytes:
        headers = BlockChecksums()
        headers.add_headers({self.partial / name: len(file.header) for name, file in self._files.items()})
        sizes = {name: file.file_bytes for name, file in self._files.items()}
        blocks = combine_pieces(chain(headers.pieces(), *written), sizes)
        records = {name: FileRecord(bytes=size, crc32=blocks[name]) for name, size in sizes.items()}
        for layout in self._layouts.values():
            records |= {name: checksum(data) for name, data in layout.index.items()}
        records |= {name: checksum(data) for name, data in self._small_files.items()}
        return manifest_bytes(records, self._config_names)
