"""From where a run goes on: what `checkpoint.resume` means."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from aliquot.checkpoint.directories import STATE, newest, tidy
from aliquot.checkpoint.evaluation_history import Evaluations
from aliquot.checkpoint.remote_files import split_url
from aliquot.checkpoint.restore import restore, restore_newest
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import DamagedCheckpoint, ResumeError
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.stores.open_store import is_url
from aliquot.tensor_io.bytemap import Shape
from aliquot.tensor_io.parts import PartStore


def resume(
    settings: CheckpointSection,
    root: Path,
    store: PartStore,
    tensors: Sequence[tuple[str, Shape]],
    ranks: RankGroup,
    learned: Collection[str] | None = None,
    instead: Callable[[Path], Path | None] = lambda _: None,
    config: Mapping[str, Any] | None = None,
) -> tuple[Path, dict[str, Any]] | None:
    """Restore what `settings.resume` (auto, never or a path) names; its directory and state, or None to start anew.

    What a URL names has been fetched by remote_download.py and is the run's own. `instead` as of `restore_newest`,
    `config` as `settings` of `restore`.

    A path is where the run under `root` begins: once it has checkpoints of its own it goes on from those, so that a
    restarted job makes progress. Collective. Raises UserError for a path that is no checkpoint, or that would go back.
    """
    wanted = settings.resume
    if wanted == "never":
        return None
    given = Path(wanted)
    if wanted != "auto" and not is_url(wanted) and not run_on_rank_0(ranks, lambda: _has_begun(given, root)):
        try:
            return given, restore(given, store, tensors, ranks, learned, config)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{error}; checkpoint.resume names it: take another one, or auto") from None
    restored = restore_newest(root, store, tensors, ranks, learned, instead, config)
    if restored is not None:
        # A run that was killed while it removed its last old checkpoint may be complete, and will save no more.
        best = Evaluations.of(restored[1]).best_step if settings.best else None
        run_on_rank_0(ranks, lambda: tidy(root, settings.keep, restored[0], best))
    return restored


def began_elsewhere(settings: CheckpointSection, mirror: str | None, root: Path, where: Path) -> bool:
    """Whether what was restored, `where`, is of another run, with which this one began: a path, or fetched from a URL
    that is not in the run's own `mirror`."""
    if where.resolve().parent != root.resolve():
        return True
    if not is_url(settings.resume):
        return False
    store, name = split_url(settings.resume)
    return name == where.name and store != mirror


def _has_begun(directory: Path, root: Path) -> bool:
    """Whether the run under `root` that starts from `directory` has checkpoints of its own."""
    if not (directory / STATE).is_file():
        raise ResumeError(
            "checkpoint.resume: no checkpoint here; give a directory like checkpoints/step-00000100", directory
        )
    latest = newest(root)
    if latest is None or latest.resolve() == directory.resolve():
        return False
    if directory.resolve().parent == root.resolve():
        raise ResumeError(
            f"checkpoint.resume: this run already has the newer {latest.name}; choose another run.name", directory
        )
    return True
