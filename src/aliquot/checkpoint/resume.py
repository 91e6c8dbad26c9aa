"""From where a run goes on: what `checkpoint.resume` means, and whether the data still lie where they did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aliquot.checkpoint.directories import STATE, newest, step_of
from aliquot.checkpoint.restore import restore, restore_newest
from aliquot.errors import UserError
from aliquot.ranges.bytemap import Shape
from aliquot.ranges.parts import PartStore
from aliquot.ranges.together import Ranks, on_first


def resume(
    wanted: str, root: Path, store: PartStore, tensors: Sequence[tuple[str, Shape]], ranks: Ranks
) -> tuple[Path, dict[str, Any]] | None:
    """Restore what `wanted` (auto, never or a path) names; its directory and state, or None to start anew. Collective.

    Raises UserError for a path that is no checkpoint, or that is older than what the run under `root` has already.
    """
    if wanted == "never":
        return None
    if wanted == "auto":
        return restore_newest(root, store, tensors, ranks)
    directory = Path(wanted)
    on_first(ranks, lambda: _check(directory, root))
    return directory, restore(directory, store, tensors, ranks)


def check_continuity(state: Mapping[str, Any], determinants: Mapping[str, Any], where: Path) -> None:
    """The next batch is only the next one if everything that data order depends on is as it was.

    Raises UserError naming each setting that differs.
    """
    before = state["determinants"]
    changed = [
        f"{key} was {before.get(key)!r} and is {value!r}"
        for key, value in determinants.items()
        if before.get(key) != value
    ]
    if changed:
        raise UserError(
            f"cannot continue on the same data: {'; '.join(changed)}. Set it back, or start anew under another run.name"
            " with model.path set to this directory",
            where,
        )


def _check(directory: Path, root: Path) -> None:
    if not (directory / STATE).is_file():
        raise UserError(
            "checkpoint.resume: no checkpoint here; give a directory like checkpoints/step-00000100", directory
        )
    latest = newest(root)
    if latest is not None and directory.resolve() != latest.resolve() and step_of(latest) >= step_of(directory):
        raise UserError(
            f"checkpoint.resume: this run already has the newer {latest.name}; choose another run.name", directory
        )
