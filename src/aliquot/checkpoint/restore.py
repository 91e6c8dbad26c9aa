"""Restore a checkpoint at any world size: every rank reads only its own ranges.

Each rank checksums the bytes that it reads; combined over all ranks these are the checksums of every block of every
file, and they must be those of the manifest. So the whole checkpoint is read once and verified.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from aliquot.checkpoint.checkpoint_files import StoredParts, held, values_of
from aliquot.checkpoint.continuity import tensors_follow_from
from aliquot.checkpoint.directories import STATE, STEMS, complete_directories, directories, newest, step_of
from aliquot.core.errors import DamagedCheckpoint, ResumeError, UserError, WeightsFileError
from aliquot.core.on_rank_0 import RankGroup, gather_results, run_on_rank_0
from aliquot.tensor_io.bytemap import ByteMap, Shape, check_tensors
from aliquot.tensor_io.checksums import BlockChecksums, Piece
from aliquot.tensor_io.jsonfile import read_json
from aliquot.tensor_io.manifest import MANIFEST, check_read, read_manifest, verify_descriptions
from aliquot.tensor_io.parts import Kind, PartStore
from aliquot.tensor_io.transfer import fill

_log = logging.getLogger(__name__)

_OUT_OF_REACH = {
    errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
}  # fmt: skip


def restore_newest(
    root: Path,
    store: PartStore,
    tensors: Sequence[tuple[str, Shape]],
    ranks: RankGroup,
    learned: Collection[str] | None = None,
    instead: Callable[[Path], Path | None] = lambda _: None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Path, dict[str, Any]] | None:
    """Restore the newest checkpoint under `root` that is whole, warning of each newer one that is not. Collective.

    Its directory and state; None if `root` holds no checkpoint. `instead`: what is to take the place of a damaged one,
    and lies under `root` then; None: there is nothing but what is there. `settings` as of `restore`. Raises UserError
    where none of those it holds is whole.
    """
    below: int | None = None
    replaced: set[Path] = set()
    while directory := _newest(root, below, ranks):
        try:
            return directory, restore(directory, store, tensors, ranks, learned, settings)
        except DamagedCheckpoint as error:
            if ranks.rank == 0:
                _log.warning("skipping a damaged checkpoint: %s", error)
        below = step_of(directory)
        if directory not in replaced and (found := instead(directory)) is not None:
            replaced.add(found)
            below = step_of(found) + 1
    return None


def restore(
    directory: Path,
    store: PartStore,
    tensors: Sequence[tuple[str, Shape]],
    ranks: RankGroup,
    learned: Collection[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fill all parts of `store` from a checkpoint; the state that was saved with it. Collective.

    `tensors` and `learned` as they were saved with. Raises on every rank: UserError where they are not those of the
    checkpoint, naming what of `settings`, the configuration, is not as it was, or where another rank does not see what
    rank 0 does; DamagedCheckpoint where it is not what was saved (the parts then hold nothing of use).
    """

    def read() -> list[Piece]:
        checksums = BlockChecksums()
        with _damage():
            maps = _maps(directory)
            every = {kind: values_of(found.entries) for kind, found in maps.items()}
        for kind, values in every.items():
            wanted = held(tensors, kind, learned)
            with _why_others(directory, settings):
                check_tensors(wanted, values, directory, set(values) - {name for name, _ in wanted})
        entries = {kind: found.entries for kind, found in maps.items()}
        stored = StoredParts(store, entries)
        with _damage():
            fill(stored.scales(), entries, checksums)
            fill(stored.values(), entries, checksums)
        return checksums.pieces()

    manifest = run_on_rank_0(ranks, lambda: _manifest_of_whole(directory))
    gather_results(ranks, lambda: _check_seen(directory, manifest))
    pieces = gather_results(ranks, read)
    return run_on_rank_0(ranks, lambda: _verified(directory, list(chain(*pieces))))


def _manifest_of_whole(directory: Path) -> str:
    with _damage():
        manifest = read_manifest(directory)
        manifest.record(STATE)
        verify_descriptions(directory, manifest, manifest.files)
        return _digest(directory)


def _digest(directory: Path) -> str:
    return hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()


def _check_seen(directory: Path, manifest: str) -> None:
    """Of a checkpoint that is whole where rank 0 looks: elsewhere it is not damaged, but another or not there."""
    try:
        read_manifest(directory)
        why = None if _digest(directory) == manifest else "another one lies here"
    except (DamagedCheckpoint, OSError) as error:
        why = str(error)
    if why is not None:
        raise ResumeError(
            f"{platform.node()} does not see this checkpoint as rank 0 does ({why}): every node needs its files, on"
            " a file system that all share",
            directory,
        )


def _verified(directory: Path, pieces: list[Piece]) -> dict[str, Any]:
    """Check all that the ranks read; the state, which was verified before."""
    with _damage():
        manifest = read_manifest(directory)
        head_bytes = {path: count for found in _maps(directory).values() for path, count in found.header_bytes.items()}
        check_read(directory, manifest, head_bytes, pieces)
        return read_json(directory / STATE)


def _maps(directory: Path) -> dict[Kind, ByteMap]:
    return {kind: ByteMap.of_directory(directory, stem) for kind, stem in STEMS.items()}


@contextlib.contextmanager
def _why_others(directory: Path, settings: Mapping[str, Any] | None) -> Iterator[None]:
    """Tensors that are not those of the model are not what a person has written: name what they follow from."""
    try:
        yield
    except WeightsFileError as error:
        if settings is None:
            raise
        with _damage():
            changed = tensors_follow_from(read_json(directory / STATE), settings)
        if not changed:
            raise
        raise ResumeError(f"{error}. {changed}: set it back, or start anew under another run.name") from None


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Whatever is wrong with the files of a checkpoint means that it is damaged; that this node does not come to them
    does not."""
    try:
        yield
    except (UserError, OSError) as error:
        if _number(error) in _OUT_OF_REACH:
            told = f"{platform.node()} cannot read this checkpoint, which need not be damaged: {error}"
            raise ResumeError(f"{told}; mend that and start again") from error
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(str(error)) from error


def _number(error: BaseException | None) -> int | None:
    """Of the operating system's error that was the reason."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return None if error is None else error.errno


def _newest(root: Path, below: int | None, ranks: RankGroup) -> Path | None:
    """What rank 0 finds. Raises UserError if that is nothing although there are checkpoints, or older than what another
    node finds."""

    def find() -> str | None:
        found = newest(root, below)
        if found is None and directories(root):
            raise ResumeError(
                "no checkpoint here is whole: move this directory away, and the run begins anew, or where"
                " checkpoint.resume says",
                root,
            )
        return str(found) if found is not None else None

    found = run_on_rank_0(ranks, find)
    step = -1 if found is None else step_of(Path(found))
    newer = gather_results(ranks, lambda: platform.node() if _newest_whole(root, below) > step else "")
    if (other := next(filter(None, newer), None)) is not None:
        raise ResumeError(
            f"{other} sees a newer checkpoint here than rank 0 does, which would train that again and replace it: every"
            " node needs this directory, on a file system that all share",
            root,
        )
    return None if found is None else Path(found)


def _newest_whole(root: Path, below: int | None) -> int:
    """Its step; -1: there is none."""
    steps = map(step_of, complete_directories(root))
    return max((step for step in steps if below is None or step < below), default=-1)
