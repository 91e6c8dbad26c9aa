"""Restore a checkpoint at any world size: every rank reads only its shards.

Each rank computes checksums of the bytes that it reads. The checksums of all ranks combine to the checksums of all
blocks of all files, which must equal the checksums in the manifest. The ranks thus verify a checkpoint while they read
it, and together read each byte once.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aliquot.checkpoint.checkpoint_files import CheckpointSpec, StoredParts, values_of
from aliquot.checkpoint.directories import STEMS, complete_directories, directories, newest, step_of
from aliquot.core.errors import DamagedCheckpoint, ResumeError, WeightsFileError
from aliquot.core.on_rank_0 import RankGroup, gather_results, run_on_all_ranks, run_on_rank_0
from aliquot.core.small_files import read_small_file
from aliquot.tensor_io.bytemap import ByteMap, check_tensors
from aliquot.tensor_io.checksums import BlockChecksums, BlockShares
from aliquot.tensor_io.manifest import (
    MANIFEST,
    check_read,
    read_manifest,
    read_state,
    reading_checkpoint,
    verify_descriptions,
)
from aliquot.tensor_io.parts import Kind, PartStore
from aliquot.tensor_io.transfer import fill

_log = logging.getLogger(__name__)

ExplainMismatch = Callable[[Mapping[str, Any]], str]  # state of a checkpoint -> changed settings that explain it, or ""


def restore_newest(
    root: Path,
    store: PartStore,
    spec: CheckpointSpec,
    ranks: RankGroup,
    replace_damaged: Callable[[Path], Path | None] = lambda _: None,
    explain_mismatch: ExplainMismatch = lambda _: "",
) -> tuple[Path, dict[str, Any]] | None:
    """Restore the newest undamaged checkpoint under `root`; warn of each newer checkpoint that is damaged. Collective.

    Args:
        replace_damaged: function that gets the directory of a damaged checkpoint, puts a replacement under `root`, and
            returns the directory of the replacement; it returns None if there is no replacement.
        explain_mismatch: see `restore`.

    Returns the checkpoint's directory and state; None if `root` holds no checkpoint. Raises UserError if `root` holds
    only damaged checkpoints, and as `restore` does.
    """
    below: int | None = None
    replaced: set[Path] = set()
    while directory := _newest_on_rank_0(root, below, ranks):
        try:
            return directory, restore(directory, store, spec, ranks, explain_mismatch)
        except DamagedCheckpoint as error:
            if ranks.rank == 0:
                _log.warning("skipping a damaged checkpoint: %s", error)
        below = step_of(directory)
        if directory not in replaced and (replacement := replace_damaged(directory)) is not None:
            replaced.add(replacement)
            below = step_of(replacement) + 1
    return None


def restore(
    directory: Path,
    store: PartStore,
    spec: CheckpointSpec,
    ranks: RankGroup,
    explain_mismatch: ExplainMismatch = lambda _: "",
) -> dict[str, Any]:
    """Load weights and moments of a checkpoint into `store`, and return the state saved with them. Collective.

    `explain_mismatch` is called if the tensors of the checkpoint differ from the tensors of `spec`. It gets the saved
    state and returns the changed settings that explain the difference, for the error.

    Raises on every rank:
        DamagedCheckpoint: the files do not match the manifest. The values in `store` are then undefined.
        UserError: the tensors of the checkpoint differ from the tensors of `spec`, or a rank sees a different
            checkpoint than rank 0.
    """

    def read() -> BlockShares:
        checksums = BlockChecksums()
        with reading_checkpoint():
            byte_maps = _byte_maps(directory)
            sizes = read_manifest(directory).sizes(_header_bytes(byte_maps))
            entries = {kind: byte_map.entries for kind, byte_map in byte_maps.items()}
            values_of_kind = {kind: values_of(stored) for kind, stored in entries.items()}
        try:
            for kind, values in values_of_kind.items():
                tensors = spec.tensors_of(kind)
                check_tensors(tensors, values, directory, set(values) - {name for name, _ in tensors})
        except WeightsFileError as error:  # users know their settings, but not the tensors
            if not (changed := explain_mismatch(read_state(directory))):
                raise
            raise ResumeError(
                f"{error}. {changed}: undo the change, or start a new run under another run.name"
            ) from None
        scales_and_values = StoredParts(store, entries).scales_and_values()
        with reading_checkpoint():
            for parts in scales_and_values:
                fill(parts, entries, checksums)
        return checksums.shares(sizes)

    digest = run_on_rank_0(ranks, lambda: _verify_descriptions(directory))
    gather_results(ranks, lambda: _check_visible(directory, digest))
    shares = run_on_all_ranks(ranks, read).combine(ranks)
    return run_on_rank_0(ranks, lambda: _verified_state(directory, shares))


def _verify_descriptions(directory: Path) -> str:
    """Verify the headers of all weight files, and all small files; return the digest of the manifest."""
    manifest = read_manifest(directory)
    verify_descriptions(directory, manifest, manifest.files)
    return _digest(directory)


def _digest(directory: Path) -> str:
    with reading_checkpoint():
        return hashlib.sha256(read_small_file(directory / MANIFEST)).hexdigest()


def _check_visible(directory: Path, digest: str) -> None:
    """Raise UserError unless this node sees the same checkpoint as rank 0, where it is complete.

    A difference means that the nodes do not share the directory, not that the checkpoint is damaged.
    """
    try:
        read_manifest(directory)
        if _digest(directory) == digest:
            return
        reason = "another checkpoint is here"
    except DamagedCheckpoint as error:
        reason = str(error)
    raise ResumeError(
        f"{platform.node()} does not see the checkpoint that rank 0 sees ({reason}). Mount the same directory on all"
        " nodes",
        directory,
    )


def _verified_state(directory: Path, shares: BlockShares) -> dict[str, Any]:
    """Compare the checksums of all ranks with the manifest; return the state, which was verified earlier."""
    with reading_checkpoint():
        check_read(directory, read_manifest(directory), _header_bytes(_byte_maps(directory)), shares)
        return read_state(directory)


def _header_bytes(byte_maps: Mapping[Kind, ByteMap]) -> dict[Path, int]:
    """Return the length of the header of each file."""
    return {path: count for files in byte_maps.values() for path, count in files.header_bytes.items()}


def _byte_maps(directory: Path) -> dict[Kind, ByteMap]:
    return {kind: ByteMap.from_directory(directory, stem) for kind, stem in STEMS.items()}


def _newest_on_rank_0(root: Path, below: int | None, ranks: RankGroup) -> Path | None:
    """Find the newest complete checkpoint that rank 0 sees, of a step less than `below`. Collective.

    Raises UserError if `root` holds checkpoints, but none is complete, or if another node sees a newer checkpoint.
    """

    def find() -> str | None:
        directory = newest(root, below)
        if directory is None and directories(root):
            raise ResumeError(
                "no checkpoint here is complete and undamaged: move this directory away, and the run starts anew"
                " or from checkpoint.resume",
                root,
            )
        return str(directory) if directory is not None else None

    def view() -> tuple[str, int]:
        steps = map(step_of, complete_directories(root))
        return platform.node(), max((step for step in steps if below is None or step < below), default=-1)

    directory = run_on_rank_0(ranks, find)
    step = -1 if directory is None else step_of(Path(directory))
    for node, node_step in gather_results(ranks, view):
        if node_step > step:
            seen = "no checkpoint" if step < 0 else f"only step {step}"
            raise ResumeError(
                f"{node} has checkpoint step {node_step}, but rank 0 sees {seen}: the nodes do not share the run"
                " directory. Mount the same directory on all nodes",
                root,
            )
    return None if directory is None else Path(directory)
