"""The checkpoints of a run, `step-00000100` and so on. The newest complete directory is the latest; no pointer.

With checkpoint.best the link `best` names one of them, for people: which it is says the state of the newest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from contextlib import suppress
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


def directory_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def step_of(directory: Path) -> int:
    """The step that a checkpoint's name tells."""
    return int(directory.name.removeprefix("step-"))


def is_name(name: str) -> bool:
    """Whether a checkpoint may be named so."""
    return _NAME.fullmatch(name) is not None


def directories(root: Path) -> list[Path]:
    """Everything under `root` that is named like a checkpoint, complete or not, oldest first. Raises OSError."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def complete_directories(root: Path) -> list[Path]:
    """All checkpoints under `root` that have a sound manifest and all files of their size, oldest first."""
    return [directory for directory in directories(root) if _damage(directory) is None]


def newest(root: Path, below: int | None = None) -> Path | None:
    """The newest complete checkpoint under `root`, of a step less than `below`; warns of each damaged one it skips."""
    for directory in reversed(directories(root)):
        if below is not None and step_of(directory) >= below:
            continue
        damage = _damage(directory)
        if damage is None:
            return directory
        _log.warning("skipping a damaged checkpoint: %s", damage)
    return None


def retain(root: Path, keep: int, published: Path, spare: Collection[int | None] = ()) -> None:
    """Remove all that is older than the `keep` newest complete checkpoints, but not `published`, nor steps `spare`."""
    complete = complete_directories(root)
    for directory in directories(root):
        old = len(complete) > keep and step_of(directory) < step_of(complete[-keep])
        if old and directory != published and step_of(directory) not in spare:
            remove_directory(directory)


def name_best(root: Path, best: int | None) -> None:
    """Let the link `best` lead to the checkpoint of that step; None: to none. Best effort: not all disks have links."""
    link, beside = root / BEST, root / f".{BEST}"
    with suppress(OSError):
        if best is None or not directory_of(root, best).is_dir():
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or link.readlink() != Path(directory_of(root, best).name):
            beside.unlink(missing_ok=True)
            beside.symlink_to(directory_of(root, best).name)
            beside.replace(link)


def clean(root: Path) -> None:
    """Remove what killed processes left of saves and removals."""
    clean_leftovers(root, _NAME)


def tidy(root: Path, keep: int, restored: Path, best: int | None = None, spare: Collection[int] = ()) -> None:
    """What the end of a save would have done, had it not been killed. Raises OSError."""
    name_best(root, best)
    retain(root, keep, restored, {best, *spare})
    clean(root)


def _damage(directory: Path) -> DamagedCheckpoint | None:
    try:
        read_manifest(directory)
    except DamagedCheckpoint as error:
        return error
    return None
