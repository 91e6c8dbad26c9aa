"""Before a run resumes: what lies elsewhere, in its mirror or at a URL, and is newer than what is here, is fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aliquot.checkpoint.directories import name_best, newest, step_of
from aliquot.checkpoint.remote_checkpoint import complete_steps, fetch, split_url
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import DamagedCheckpoint, ResumeError, StorageError
from aliquot.core.on_rank_0 import RankGroup, on_first
from aliquot.stores.open_store import is_url, open_store


def fetch_newer(
    settings: CheckpointSection, mirror: str | None, root: Path, ranks: RankGroup, warn: Callable[[str], None]
) -> None:
    """Afterwards `root` holds what this run goes on from, if anything does. Collective.

    Raises UserError where the mirror holds checkpoints that `resume: never` would mix with others, where it cannot be
    reached and nothing is here, and where neither it nor a URL that is named holds a checkpoint that is whole.
    """

    def look() -> list[list[str]]:
        here, found = newest(root), []
        try:
            found = complete_steps(open_store(mirror)) if mirror is not None else []
        except StorageError as error:
            if here is None or settings.on_error == "stop":
                raise StorageError(f"checkpoint.mirror: {error}") from None
            warn(f"checkpoint.mirror: {error}; going on from {here}")
        if found and settings.resume == "never":
            raise ResumeError(
                f"checkpoint.resume is `never`, and {mirror} holds {found[-1]}; choose another run.name, or resume:"
                " auto"
            )
        newer = [[mirror or "", name] for name in found if here is None or step_of(Path(name)) > step_of(here)]
        if here is None and not newer and is_url(settings.resume):
            return [list(split_url(settings.resume))]
        return newer

    candidates = on_first(ranks, look)
    damaged = False
    while candidates:
        url, folder = candidates.pop()
        try:
            fetch(url, folder, root, ranks)
            return
        except StorageError as error:
            if settings.on_error == "stop" or on_first(ranks, lambda: newest(root) is None):
                raise
            warn(f"checkpoint.mirror: {error}; going on from what is here")
            return
        except DamagedCheckpoint as error:
            if is_url(settings.resume) and not candidates:
                raise
            warn(f"skipping a damaged checkpoint: {url}: {error}")
            damaged = True
    if damaged and settings.resume == "auto" and on_first(ranks, lambda: newest(root) is None):
        raise ResumeError(
            f"no checkpoint in {mirror} is whole: choose another run.name to begin anew, or a checkpoint.resume: PATH"
        )


def fetch_instead(
    settings: CheckpointSection, mirror: str | None, damaged: Path, ranks: RankGroup, warn: Callable[[str], None]
) -> Path | None:
    """The mirror's copy of a checkpoint that has proved `damaged` takes its place, or the next older one that is newer
    than what is here: where it lies. None: the mirror has none that is whole. Collective.

    Raises UserError where the mirror does not answer and `checkpoint.on_error` is stop.
    """
    if mirror is None:
        return None
    root, last = damaged.parent, step_of(damaged)

    def look() -> list[str]:
        before = newest(root, last)
        first = -1 if before is None else step_of(before)
        return [name for name in complete_steps(open_store(mirror)) if first < step_of(Path(name)) <= last]

    try:
        candidates = on_first(ranks, look)
        while candidates:
            folder = candidates.pop()
            try:
                fetched = fetch(mirror, folder, root, ranks)
            except DamagedCheckpoint as error:
                warn(f"skipping a damaged checkpoint: {mirror}: {error}")
                continue
            warn(f"{mirror}/{folder} takes the place of what is damaged")
            return fetched
    except StorageError as error:
        if settings.on_error == "stop":
            raise StorageError(f"checkpoint.mirror: {error}") from None
        warn(f"checkpoint.mirror: {error}; going on from what is here")
    return None


def fetch_best(mirror: str | None, best: Path, ranks: RankGroup, warn: Callable[[str], None]) -> bool:
    """Whether `best`, which is not here any more, is here again, out of the mirror. Collective."""
    if mirror is None:
        return False
    try:
        if not on_first(ranks, lambda: best.name in complete_steps(open_store(mirror))):
            return False
        fetch(mirror, best.name, best.parent, ranks)
    except (DamagedCheckpoint, StorageError) as error:
        warn(f"the checkpoint that evaluated best could not be fetched: {mirror}: {error}")
        return False
    on_first(ranks, lambda: name_best(best.parent, step_of(best)))
    return True
