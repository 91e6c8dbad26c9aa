"""Directories appear whole or not at all: written beside, fsynced, renamed; removed by renaming first.

`.NAME.partial-1a2b3c4d` is being written, `NAME` is published, `.NAME.trash-1a2b3c4d` is being removed, and
`.NAME.former-1a2b3c4d` being replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from aliquot.core.errors import StorageError, writing
from aliquot.core.on_rank_0 import RankGroup, gather_results, run_on_rank_0

T = TypeVar("T")
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?:partial|trash|former)-[0-9a-f]{8}")


def publish_together(
    target: Path,
    ranks: RankGroup,
    prepare: Callable[[Path], None],
    write: Callable[[Path], T],
    finish: Callable[[Path, list[T]], None],
    replace: bool = False,
    spare: Callable[[Path], bool] = lambda former: False,
) -> None:
    """Make the directory `target`: rank 0 prepares it, every rank writes, rank 0 finishes and renames it. Collective.

    `write` returns a JSON value; `finish` gets those of all ranks. An error anywhere is raised on every rank and leaves
    nothing behind, as does a `target` that exists and is not empty, unless it is to be replaced: see `commit`.
    """

    def publish(written: list[T]) -> None:
        finish(partial, written)
        commit(partial, target, replace, spare)

    partial = begin(target, ranks, prepare)
    try:
        written = gather_results(ranks, lambda: write(partial))
        run_on_rank_0(ranks, lambda: publish(written))
    except Exception:
        if ranks.rank == 0:
            remove_directory(partial)
        raise


def begin(target: Path, ranks: RankGroup, prepare: Callable[[Path], None]) -> Path:
    """The directory beside `target` that is to become it, made and prepared by rank 0. Collective."""
    return Path(run_on_rank_0(ranks, lambda: str(_prepared(target, prepare))))


def begin_alone(target: Path) -> Path:
    """An empty directory beside `target`, for one process. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(target, "partial")
    partial.mkdir()
    return partial


def commit(
    partial: Path, target: Path, replace: bool = False, spare: Callable[[Path], bool] = lambda former: False
) -> None:
    """Give `partial`, whose files the disk has, the name `target`: from then on it is complete.

    `spare`: of what was replaced, which has another name by then, whether it has been kept. Raises OSError, and then
    nothing has the name, or what is to be replaced has it still.
    """
    sync(partial)
    former = set_aside(target, "former") if replace and target.exists() else None
    try:
        partial.rename(target)  # replaces an empty directory, fails on any other
        try:
            sync(target.parent)
        except OSError:
            # The disk may not have the name: it is taken back, lest others count on what its maker calls failed.
            with contextlib.suppress(OSError):
                target.rename(partial)
            raise
    except OSError:
        if former is not None:
            former.rename(target)
        raise
    if former is not None:
        with contextlib.suppress(OSError):
            if not spare(former):
                shutil.rmtree(former, ignore_errors=True)


def sync(path: Path) -> None:
    """Return when the disk has the file, or the names in the directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_plain_name(name: str) -> bool:
    """Whether `name` names a file in the directory itself: no separator, no `..`, nothing that a terminal obeys."""
    return name not in ("", ".", "..") and name.isprintable() and not set(name) & {"/", "\\"}


def check_names(names: Iterable[str], taken: Iterable[str]) -> None:
    """Raise ValueError unless `names` are plain file names that a directory of safetensors and `taken` can hold too."""
    bad = [name for name in names if not is_plain_name(name) or ".safetensors" in name or name in taken]
    if bad:
        raise ValueError(f"not names of files that can lie beside the weights: {bad}")


def write_file(path: Path, data: bytes) -> None:
    """A new file with content `data`, fsynced. Raises UserError."""
    with writing(path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def check_space(directory: Path, needed_bytes: int, instead_of: Path | None = None) -> None:
    """Raise UserError if the file system of `directory` says that it has less than `needed_bytes` free; but if it would
    have them without the directory `instead_of`, remove that."""
    found = os.statvfs(directory)
    free_bytes = found.f_bavail * found.f_frsize
    if not found.f_blocks or free_bytes >= needed_bytes:  # some network file systems say nothing
        return
    if instead_of is not None:
        freed_bytes = sum(path.stat().st_blocks * 512 for path in instead_of.rglob("*") if path.is_file())
        if free_bytes + freed_bytes >= needed_bytes:
            remove_directory(instead_of)
            return
    raise StorageError(f"needs {_size(needed_bytes)} and {_size(free_bytes)} are free", directory.parent)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def set_aside(directory: Path, what: str = "trash") -> Path:
    """Rename a directory so that `clean_leftovers` takes it for waste; its new name. Raises OSError."""
    name = match["name"] if (match := _LEFTOVER.fullmatch(directory.name)) else directory.name
    return directory.rename(_beside(directory.with_name(name), what))


def put_back(parent: Path) -> None:
    """Give what was being replaced its name again, where a process was killed before the new one had it. Raises
    OSError."""
    for path in list(parent.glob(".*.former-*")):
        match = _LEFTOVER.fullmatch(path.name)
        if match and not (parent / match["name"]).exists():
            path.rename(parent / match["name"])


def remove_directory(directory: Path) -> None:
    """Remove a directory such that, killed midway, no part of it is left under its name. Best effort, never raises."""
    with contextlib.suppress(OSError):
        shutil.rmtree(set_aside(directory), ignore_errors=True)


def clean_leftovers(parent: Path, names: re.Pattern[str]) -> None:
    """Remove what killed processes left of directories whose published name matches `names`. Raises OSError."""
    for path in list(parent.iterdir()) if parent.is_dir() else ():
        match = _LEFTOVER.fullmatch(path.name)
        if match and names.fullmatch(match["name"]):
            shutil.rmtree(path, ignore_errors=True)


def _prepared(target: Path, prepare: Callable[[Path], None]) -> Path:
    partial = begin_alone(target)
    try:
        prepare(partial)
    except Exception:
        remove_directory(partial)
        raise
    return partial


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}-{secrets.token_hex(4)}")
