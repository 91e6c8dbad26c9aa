"""Before a run resumes: what lies elsewhere, in its mirror or at a URL, and is newer than what is here, is fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aliquot.checkpoint.directories import STATE, complete_directories, directory_of, newest, step_of
from aliquot.checkpoint.evaluations import Evaluations
from aliquot.checkpoint.mirrored import complete_steps, fetch, split_url
from aliquot.config.schema import CheckpointSection
from aliquot.errors import DamagedCheckpoint, ResumeError, StorageError
from aliquot.ranges.jsonfile import read_json
from aliquot.ranges.together import RankGroup, on_first
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
            if settings.best:
                _fetch_best(url, root / folder, root, ranks, warn)
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
    if damaged and on_first(ranks, lambda: newest(root) is None):
        raise ResumeError(
            f"no checkpoint in {mirror} is whole: resume from a PATH, or take another checkpoint.mirror to start anew"
        )


def _fetch_best(url: str, fetched: Path, root: Path, ranks: RankGroup, warn: Callable[[str], None]) -> None:
    """The checkpoint that evaluated best, by the state of the newest, where it is there and not here."""

    def look() -> str | None:
        best = Evaluations.of(read_json(fetched / STATE)).best_step
        if best is None or directory_of(root, best) in complete_directories(root):
            return None
        name = directory_of(root, best).name
        return name if name in complete_steps(open_store(url)) else None

    name = on_first(ranks, look)
    if name is not None:
        try:
            fetch(url, name, root, ranks)
        except (DamagedCheckpoint, StorageError) as error:
            warn(f"the checkpoint that evaluated best could not be fetched: {url}: {error}")
