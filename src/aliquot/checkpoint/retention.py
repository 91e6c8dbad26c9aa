"""Retention: remove old checkpoints of a run, name the best one, and clean up after killed processes.

With `checkpoint.best` the link `best` leads people to the best checkpoint. A run reads the best step from the state of
the newest checkpoint instead.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aliquot.checkpoint.directories import NAME, complete_directories, directories, directory_of, step_of
from aliquot.tensor_io.publish import clean_leftovers, remove_directory

BEST = "best"


@dataclass(frozen=True)
class Retention:
    """The checkpoints that stay: the `keep` newest complete ones, that of step `best`, and those of protected steps."""

    keep: int
    best: int | None = None
    protected_steps: Collection[int] = ()


def retain(root: Path, keep: int, published: Path, protected: Collection[int | None] = ()) -> None:
    """Remove checkpoints older than the `keep` newest complete ones, except `published` and the `protected` steps."""
    complete = complete_directories(root)
    for directory in directories(root):
        is_old = len(complete) > keep and step_of(directory) < step_of(complete[-keep])
        if is_old and directory != published and step_of(directory) not in protected:
            remove_directory(directory)


def name_best(root: Path, best: int | None) -> None:
    """Point the link `best` to the checkpoint of that step, or remove it for None. Not all file systems have links:
    errors are ignored.
    """
    link, new_link = root / BEST, root / f".{BEST}"
    with suppress(OSError):
        if best is None or not directory_of(root, best).is_dir():
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or link.readlink() != Path(directory_of(root, best).name):
            new_link.unlink(missing_ok=True)
            new_link.symlink_to(directory_of(root, best).name)
            new_link.replace(link)


def clean(root: Path) -> None:
    """Remove temporary directories that killed processes left."""
    clean_leftovers(root, NAME)


def tidy(root: Path, current: Path, retention: Retention) -> None:
    """Update the link `best`, apply retention and remove leftovers: the end of a save. Raises OSError.

    Args:
        current: the checkpoint just published or restored, which stays in any case.
    """
    name_best(root, retention.best)
    retain(root, retention.keep, current, {retention.best, *retention.protected_steps})
    clean(root)
