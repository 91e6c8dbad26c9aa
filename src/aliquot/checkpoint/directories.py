"""The checkpoint directories of a run, `step-00000100` and so on: names, completeness and retention.

The newest complete directory is the latest checkpoint; no pointer file names it. With `checkpoint.best` the link `best`
leads people to the best checkpoint. A run reads the best step from the state of the newest checkpoint instead.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aliquot.core.errors import DamagedCheckpoint
from aliquot.tensor_io.manifest import read_manifest
from aliquot.tensor_io.parts import Kind
from aliquot.tensor_io.publish import clean_leftovers, remove_directory

STEMS: dict[Kind, str] = {"weight": "model", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
STATE = "state.json"
BEST = "best"

_NAME = re.compile(r"step-([0-9]{8,})")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """The checkpoints that stay: the `keep` newest complete ones, that of step `best`, and those of protected steps."""

    keep: int
    best: int | None = None
    protected_steps: Collection[int] = ()


def directory_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def step_of(directory: Path) -> int:
    """Parse the step from the name of a checkpoint."""
    return int(directory.name.removeprefix("step-"))


def is_name(name: str) -> bool:
    """Return whether `name` is the name of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def directories(root: Path) -> list[Path]:
    """List the checkpoints under `root`, complete or not, oldest first. Raises OSError."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def complete_directories(root: Path) -> list[Path]:
    """List the checkpoints under `root` with a valid manifest and all files at their recorded size, oldest first."""
    return [directory for directory in directories(root) if _damage(directory) is None]


def newest(root: Path, below: int | None = None) -> Path | None:
    """Find the newest complete checkpoint under `root`, of a step less than `below`; warn of damaged newer ones."""
    for directory in reversed(directories(root)):
        if below is not None and step_of(directory) >= below:
            continue
        damage = _damage(directory)
        if damage is None:
            return directory
        _log.warning("skipping a damaged checkpoint: %s", damage)
    return None


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
    clean_leftovers(root, _NAME)


def tidy(root: Path, current: Path, retention: Retention) -> None:
    """Update the link `best`, apply retention and remove leftovers: the end of a save. Raises OSError.

    Args:
        current: the checkpoint just published or restored, which stays in any case.
    """
    name_best(root, retention.best)
    retain(root, retention.keep, current, {retention.best, *retention.protected_steps})
    clean(root)


def _damage(directory: Path) -> DamagedCheckpoint | None:
    try:
        read_manifest(directory)
    except DamagedCheckpoint as error:
        return error
    return None
