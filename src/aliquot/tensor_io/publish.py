"""Publish directories atomically: write under a temporary name, fsync, rename. Removal also begins with a rename.

- `NAME`: published and complete.
- `.NAME.partial-1a2b3c4d`: being written.
- `.NAME.former-1a2b3c4d`: the earlier `NAME`, while a new one replaces it.
- `.NAME.trash-1a2b3c4d`: being removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from aliquot.core.errors import StorageError, writing
from aliquot.core.on_rank_0 import RankGroup, run_on_all_ranks, run_on_rank_0
from aliquot.core.small_files import flush_to_disk

T = TypeVar("T")
_log = logging.getLogger(__name__)
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?:partial|trash|former)-[0-9a-f]{8}")


def publish_together(
    target: Path,
    ranks: RankGroup,
    prepare: Callable[[Path], None],
    write: Callable[[Path], T],
    finish: Callable[[Path, T], None],
    combine: Callable[[T], T] = lambda written: written,
    keep_former: Callable[[Path], bool] | None = None,
) -> None:
    """Publish the directory `target`, to which all ranks write. Collective.

    Rank 0 calls `prepare`, every rank calls `write`, and rank 0 calls `finish` and renames the directory. After all
    ranks have written, `combine`, a collective, combines the results of `write` for `finish`. An error on any rank is
    raised on every rank, and the unfinished directory is removed. With `keep_former`, an existing `target` is replaced:
    see `commit`. Otherwise `target` must be new or empty.
    """

    def publish(written: T) -> None:
        finish(partial, written)
        commit(partial, target, keep_former is not None, keep_former or (lambda former: False))

    partial = begin(target, ranks, prepare)
    try:
        written = combine(run_on_all_ranks(ranks, lambda: write(partial)))
        run_on_rank_0(ranks, lambda: publish(written))
    except Exception:
        if ranks.rank == 0:
            remove_directory(partial)
        raise


def begin(target: Path, ranks: RankGroup, prepare: Callable[[Path], None]) -> Path:
    """Let rank 0 create and prepare the temporary directory of `target`, and return its path. Collective."""
    return Path(run_on_rank_0(ranks, lambda: str(_prepared(target, prepare))))


def begin_alone(target: Path) -> Path:
    """Create the temporary directory of `target`, which `commit` will rename, in one process. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _temporary_path(target, "partial")
    partial.mkdir()
    return partial


def commit(
    partial: Path, target: Path, replace: bool = False, keep_former: Callable[[Path], bool] = lambda former: False
) -> None:
    """Rename the temporary directory `partial`, whose files are already fsynced, to `target`.

    With `replace`, an existing `target` is renamed first and removed after the commit. `keep_former` receives the new
    path of this former directory, and returns whether to keep the directory. After an OSError, `target` does not exist,
    or is still the former directory.
    """
    sync(partial)
    former = set_aside(target, "former") if replace and target.exists() else None
    try:
        partial.rename(target)  # replaces an empty directory, fails on any other
        try:
            sync(target.parent)
        except OSError:
            # The new name may not be on the disk. Undo the rename, so that nobody uses a directory whose commit failed.
            with contextlib.suppress(OSError):
                target.rename(partial)
            raise
    except OSError:
        if former is not None:
            former.rename(target)
        raise
    if former is not None:
        try:
            if not keep_former(former):
                shutil.rmtree(former, ignore_errors=True)
        except OSError as error:  # the new directory is complete
            _log.warning("%s keeps what %s held, until this is replaced again: %s", former, target, error)


def sync(path: Path) -> None:
    """Fsync a file, or the entries of a directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_plain_name(name: str) -> bool:
    """Return whether `name` is a plain file name: no separators, no control characters, not `.` or `..`."""
    return name not in ("", ".", "..") and name.isprintable() and not set(name) & {"/", "\\"}


def check_names(names: Iterable[str], taken: Iterable[str]) -> None:
    """Raise ValueError unless `names` are plain file names, none of them a safetensors file or in `taken`."""
    bad = [name for name in names if not is_plain_name(name) or ".safetensors" in name or name in taken]
    if bad:
        raise ValueError(f"not names of files that can lie beside the weights: {bad}")


def write_file(path: Path, data: bytes) -> None:
    """Write and fsync a new file. Raises UserError."""
    with writing(path), path.open("xb") as file:
        file.write(data)
        flush_to_disk(file)


def check_space(directory: Path, needed_bytes: int, instead_of: Path | None = None) -> None:
    """Raise UserError if `needed_bytes` are not free on the file system of `directory`.

    `instead_of`: a directory that is removed if this frees enough space.
    """
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    if not status.f_blocks or free_bytes >= needed_bytes:  # some network file systems report no sizes
        return
    if instead_of is not None:
        freed_bytes = sum(path.stat().st_blocks * 512 for path in instead_of.rglob("*") if path.is_file())
        if free_bytes + freed_bytes >= needed_bytes:
            remove_directory(instead_of)
            return
    needed, free = (
        f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB" for size in (needed_bytes, free_bytes)
    )
    raise StorageError(f"needs {needed} and {free} are free", directory.parent)


def set_aside(directory: Path, suffix: str = "trash") -> Path:
    """Rename a directory to a temporary name, which `clean_leftovers` removes; return its new path. Raises OSError."""
    name = match["name"] if (match := _LEFTOVER.fullmatch(directory.name)) else directory.name
    return directory.rename(_temporary_path(directory.with_name(name), suffix))


def restore_former(parent: Path) -> None:
    """Undo unfinished replacements of killed processes: rename `former` directories back to NAME. Raises OSError."""
    for path in list(parent.glob(".*.former-*")):
        match = _LEFTOVER.fullmatch(path.name)
        if match and not (parent / match["name"]).exists():
            path.rename(parent / match["name"])


def remove_directory(directory: Path) -> None:
    """Remove a directory: rename it first, so that a kill leaves no incomplete directory under its name.

    Errors are ignored.
    """
    with contextlib.suppress(OSError):
        shutil.rmtree(set_aside(directory), ignore_errors=True)


def clean_leftovers(parent: Path, names: re.Pattern[str]) -> None:
    """Remove temporary directories in `parent` that killed processes left, if their NAME matches `names`.

    Raises OSError.
    """
    for path in list(parent.iterdir()) if parent.is_dir() else ():
        match = _LEFTOVER.fullmatch(path.name)
        if match and names.fullmatch(match["name"]):
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                _log.warning("%s, which an earlier process left, could not be removed, and takes up space", path)


def _prepared(target: Path, prepare: Callable[[Path], None]) -> Path:
    partial = begin_alone(target)
    try:
        prepare(partial)
    except Exception:
        remove_directory(partial)
        raise
    return partial


def _temporary_path(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{suffix}-{secrets.token_hex(4)}")
