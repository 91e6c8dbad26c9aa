"""Download checkpoints from a store before a run resumes, or for an export."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from aliquot.checkpoint.directories import name_best, newest, step_of
from aliquot.checkpoint.remote_files import Range, checked, complete_steps, in_threads, ranges_of, share_of, split_url
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import DamagedCheckpoint, ResumeError, StorageError, writing
from aliquot.core.on_rank_0 import RankGroup, SingleRank, run_on_rank_0
from aliquot.stores.base import Store
from aliquot.stores.open_store import is_url, open_store
from aliquot.tensor_io.checksums import BLOCK_BYTES
from aliquot.tensor_io.manifest import MANIFEST, Manifest, parse_manifest
from aliquot.tensor_io.publish import (
    begin_alone,
    check_space,
    clean_leftovers,
    publish_together,
    remove_directory,
    write_file,
)


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

    candidates = run_on_rank_0(ranks, look)
    damaged = False
    while candidates:
        url, folder = candidates.pop()
        try:
            fetch(url, folder, root, ranks)
            return
        except StorageError as error:
            if settings.on_error == "stop" or run_on_rank_0(ranks, lambda: newest(root) is None):
                raise
            warn(f"checkpoint.mirror: {error}; going on from what is here")
            return
        except DamagedCheckpoint as error:
            if is_url(settings.resume) and not candidates:
                raise
            warn(f"skipping a damaged checkpoint: {url}: {error}")
            damaged = True
    if damaged and settings.resume == "auto" and run_on_rank_0(ranks, lambda: newest(root) is None):
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
        candidates = run_on_rank_0(ranks, look)
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
        if not run_on_rank_0(ranks, lambda: best.name in complete_steps(open_store(mirror))):
            return False
        fetch(mirror, best.name, best.parent, ranks)
    except (DamagedCheckpoint, StorageError) as error:
        warn(f"the checkpoint that evaluated best could not be fetched: {mirror}: {error}")
        return False
    run_on_rank_0(ranks, lambda: name_best(best.parent, step_of(best)))
    return True


def fetch(url: str, folder: str, root: Path, ranks: RankGroup) -> Path:
    """Checkpoint `folder` of the store at `url` becomes `root/folder`, every rank reading its share once. Collective.

    Raises on every rank: DamagedCheckpoint where what arrives is not what was saved, StorageError.
    """
    text = run_on_rank_0(ranks, lambda: _manifest_of(open_store(url), folder).decode())
    manifest = parse_manifest(text.encode(), f"{url}/{folder}/{MANIFEST}")
    target = root / folder

    def finish(partial: Path, _: list[None]) -> None:
        write_file(partial / MANIFEST, text.encode())

    publish_together(
        target,
        ranks,
        prepare=lambda partial: _lay_out(manifest, partial, manifest.files),
        write=lambda partial: _fetch(open_store(url), folder, manifest, partial, manifest.files, ranks),
        finish=finish,
        replace=True,  # what is there is damaged
    )
    return target


@contextmanager
def fetched_weights(url: str, beside: Path, all_files: bool) -> Iterator[Path]:
    """A checkpoint at `url` in a directory for a while, next to `beside`; of moments only sizes, unless `all_files`."""
    parent, folder = split_url(url)
    store = open_store(parent)
    data = _manifest_of(store, folder)
    manifest = parse_manifest(data, f"{url}/{MANIFEST}")
    wanted = {name for name in manifest.files if all_files or not name.startswith("exp_avg")}
    target = beside.resolve().with_name(f"{beside.name}.fetched")
    with writing(target):
        clean_leftovers(target.parent, re.compile(re.escape(target.name)))
        directory = begin_alone(target)
    try:
        _lay_out(manifest, directory, wanted)
        _fetch(store, folder, manifest, directory, wanted, SingleRank())
        write_file(directory / MANIFEST, data)
        yield directory
    finally:
        remove_directory(directory)


def _manifest_of(store: Store, folder: str) -> bytes:
    name = f"{folder}/{MANIFEST}"
    size_bytes = store.list().get(name)
    if size_bytes is None:
        raise DamagedCheckpoint(f"{folder}: no complete checkpoint there: it has no {MANIFEST}")
    return store.read(name, 0, size_bytes)


def _lay_out(manifest: Manifest, directory: Path, wanted: Collection[str]) -> None:
    """Files of their size, which take no room before they are written."""
    check_space(directory, sum(manifest.files[name].bytes for name in wanted))
    for name, record in manifest.files.items():
        with writing(directory / name), (directory / name).open("xb") as file:
            file.truncate(record.bytes)


def _fetch(
    store: Store, folder: str, manifest: Manifest, directory: Path, wanted: Collection[str], ranks: RankGroup
) -> None:
    """This rank's share of the wanted files into `directory`."""

    def fetch_block(part: Range) -> None:
        data = checked(store.read(f"{folder}/{part.name}", part.start, part.stop), manifest, part, part.start)
        with writing(directory / part.name), (directory / part.name).open("r+b") as file:
            file.seek(part.start)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    in_threads(fetch_block, share_of(ranges_of(manifest, wanted, lambda _: BLOCK_BYTES), ranks.rank, ranks.world_size))
