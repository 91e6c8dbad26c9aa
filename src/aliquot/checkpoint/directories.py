"""The checkpoint directories of a run, such as `step-00000100`: their names, and how to find complete ones.

The latest checkpoint is the newest complete directory; there is no file that names the latest checkpoint.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from pathlib import Path

from aliquot.core.errors import DamagedCheckpoint, ResumeError
from aliquot.tensor_io.manifest import read_manifest
from aliquot.tensor_io.parts import Kind

STEMS: dict[Kind, str] = {"weight": "model", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

NAME = re.compile(r"step-([0-9]{8,})")
_log = logging.getLogger(__name__)


def directory_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def step_of(directory: Path) -> int:
    """Parse the step from the directory name of a checkpoint."""
    return int(directory.name.removeprefix("step-"))


def directories(root: Path) -> list[Path]:
    """List the checkpoints under `root`, including incomplete ones, oldest first. Raises OSError."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def complete_directories(root: Path) -> list[Path]:
    """List the readable checkpoints under `root` with a valid manifest and all files at their recorded size.

    The oldest checkpoint is first.
    """
    complete = []
    for directory in directories(root):
        with suppress(DamagedCheckpoint, ResumeError):
            read_manifest(directory)
            complete.append(directory)
    return complete


def newest(root: Path, below: int | None = None) -> Path | None:
    """Find the newest complete checkpoint under `root`; warn of newer checkpoints that are damaged.

    With `below`, only checkpoints of earlier steps than `below` count. Raises ResumeError if a newer checkpoint cannot
    be read, and therefore need not be damaged.
    """
    for directory in reversed(directories(root)):
        if below is None or step_of(directory) < below:
            try:
                read_manifest(directory)
                return directory
            except DamagedCheckpoint as damage:
                _log.warning("skipping a damaged checkpoint: %s", damage)
    return None
