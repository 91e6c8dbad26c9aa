"""Save a checkpoint: every rank writes its own ranges into files that rank 0 laid out, then one rename publishes them.

step-00000100/
  model*.safetensors        fp32 master weights: with `config_files` a Hugging Face directory
  exp_avg*.safetensors      first moments, fp32, or as frugal ones are kept: checkpoint_files.py
  exp_avg_sq*.safetensors   second moments
  state.json                where the run stands
  manifest.json             size and block checksums of all the others, written last
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from aliquot.checkpoint.checkpoint_files import StoredParts, held, laid_out
from aliquot.checkpoint.directories import STATE, STEMS, clean, directory_of, tidy
from aliquot.core.on_rank_0 import RankGroup, gather_results, run_on_rank_0
from aliquot.optim.sizes import States
from aliquot.tensor_io.bytemap import Shape
from aliquot.tensor_io.checksums import BlockChecksums, Piece, combine_pieces
from aliquot.tensor_io.manifest import MANIFEST, FileRecord, checksum, manifest_bytes
from aliquot.tensor_io.parts import PartSource
from aliquot.tensor_io.publish import begin, check_names, check_space, commit, remove_directory, write_file
from aliquot.tensor_io.transfer import Watch, drain

MAX_FILE_BYTES = 4 << 30

_log = logging.getLogger(__name__)


def save(
    root: Path,
    step: int,
    store: PartSource,
    tensors: Sequence[tuple[str, Shape]],
    state: Mapping[str, Any],
    config_files: Mapping[str, bytes],
    ranks: RankGroup,
    keep: int,
    states: States = "fp32",
    learned: Collection[str] | None = None,
) -> Path:
    """Write `root/step-<step>` and then keep only the `keep` newest complete checkpoints. Collective.

    `tensors`: names and shapes of the weights that it holds, the whole model's in its order or an adapter's, the same
    on every rank; `learned`: those of them that have moments, None: all. `state`: any JSON object. `states`: how
    moments are stored.
    `config_files`: config.json, tokenizer files and so on by plain name. Of both, rank 0's are written. A checkpoint of
    the same step is replaced. Raises the same UserError on every rank where any of them cannot write: then nothing is
    left of this one and the earlier ones are as they were.
    """
    draft = Draft.begin(root, step, tensors, state, config_files, ranks, states, learned)
    try:
        written = gather_results(ranks, lambda: draft.write(store))
        run_on_rank_0(ranks, lambda: draft.publish(written, keep))
    except Exception:
        if ranks.rank == 0:
            draft.abandon()
        raise
    return draft.target


class Draft:
    """A checkpoint that is being written, in a directory beside its own."""

    def __init__(
        self,
        root: Path,
        step: int,
        tensors: Sequence[tuple[str, Shape]],
        small_files: dict[str, bytes],
        names: list[str],
        states: States,
        learned: Collection[str] | None,
    ) -> None:
        self.target = directory_of(root, step)
        self.partial = Path()
        self._root = root
        self._layouts = {
            kind: laid_out(held(tensors, kind, learned), kind, stem, states, MAX_FILE_BYTES)
            for kind, stem in STEMS.items()
        }
        self._files = {file.name: file for layout in self._layouts.values() for file in layout.files}
        self._small_files = small_files
        self._names = names  # of config_files

    @classmethod
    def begin(
        cls,
        root: Path,
        step: int,
        tensors: Sequence[tuple[str, Shape]],
        state: Mapping[str, Any],
        config_files: Mapping[str, bytes],
        ranks: RankGroup,
        states: States = "fp32",
        learned: Collection[str] | None = None,
    ) -> Draft:
        """Rank 0 makes the directory and lays the files out. Collective; arguments and errors as of `save`."""
        small_files = {STATE: json.dumps(state, indent=1).encode(), **config_files}
        draft = cls(root, step, tensors, small_files, sorted(config_files), states, learned)
        run_on_rank_0(ranks, lambda: clean(root))
        draft.partial = begin(draft.target, ranks, draft._prepare)
        return draft

    def write(self, store: PartSource, watch: Watch | None = None) -> list[Piece]:
        """Write and fsync the parts that this rank owns; what `publish` needs to know of them. Raises UserError."""
        checksums = BlockChecksums()
        entries = {kind: layout.byte_map(self.partial).entries for kind, layout in self._layouts.items()}
        drain(StoredParts(store, entries), entries, checksums, watch)
        return checksums.pieces()

    def publish(
        self, written: Sequence[Sequence[Piece]], keep: int, best: int | None = None, spare: Collection[int] = ()
    ) -> None:
        """On rank 0, when all ranks have written: the manifest, one rename, then retention, from which the checkpoint
        of step `best` is exempt, and those of steps `spare`. Raises OSError where there is no such checkpoint then,
        or the one that there was."""
        self._finish(written)
        commit(self.partial, self.target, replace=True)
        try:
            tidy(self._root, keep, self.target, best, spare)
        except OSError as error:  # it is saved all the same; the next save tidies again
            _log.warning("what earlier saves left could not be removed: %s", error)

    def abandon(self) -> None:
        """On rank 0, when no rank writes any more: leave nothing behind."""
        remove_directory(self.partial)

    def _prepare(self, partial: Path) -> None:
        check_names(self._names, taken={STATE, MANIFEST})
        check_space(partial, sum(file.file_bytes for file in self._files.values()))
        for layout in self._layouts.values():
            layout.create_files(partial)
        for name, data in self._small_files.items():
            write_file(partial / name, data)

    def _finish(self, written: Sequence[Sequence[Piece]]) -> None:
        heads = BlockChecksums()
        heads.add_heads({self.partial / name: len(file.header) for name, file in self._files.items()})
        sizes = {name: file.file_bytes for name, file in self._files.items()}
        blocks = combine_pieces(chain(heads.pieces(), *written), sizes)
        records = {name: FileRecord(bytes=size, crc32=blocks[name]) for name, size in sizes.items()}
        for layout in self._layouts.values():
            records |= {name: checksum(data) for name, data in layout.index.items()}
        records |= {name: checksum(data) for name, data in self._small_files.items()}
        write_file(self.partial / MANIFEST, manifest_bytes(records, self._names))
