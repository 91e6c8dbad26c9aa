"""Download checkpoints from a store: from the mirror or a URL before a run resumes, or for an export."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from aliquot.checkpoint.directories import newest, step_of
from aliquot.checkpoint.remote_files import (
    FileRange,
    complete_steps,
    share_of_rank,
    split_files,
    split_url,
    transfer_in_threads,
    verified_block,
)
from aliquot.checkpoint.retention import name_best
from aliquot.config.schema import CheckpointSection
from aliquot.core.errors import DamagedCheckpoint, ResumeError, StorageError, writing
from aliquot.core.on_rank_0 import RankGroup, SingleRank, run_on_rank_0
from aliquot.stores.store import Store, is_url, open_store
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
    """Fetch the newest checkpoint to `root` if the mirror or a URL in `checkpoint.resume` has a newer one. Collective.

    Raises:
        UserError: the mirror holds checkpoints that `resume: never` would mix with new ones; the mirror cannot be
            reached and `root` holds no checkpoint; or all checkpoints of the mirror and the URL are damaged.
    """

    def find_newer() -> list[list[str]]:
        latest, names = newest(root), []
        try:
            names = complete_steps(open_store(mirror)) if mirror is not None else []
        except StorageError as error:
            if latest is None or settings.on_error == "stop":
                raise StorageError(f"checkpoint.mirror: {error}") from None
            warn(f"checkpoint.mirror: {error}; resuming from {latest}")
        if names and settings.resume == "never":
            raise ResumeError(
                f"checkpoint.resume is `never`, and {mirror} holds {names[-1]}; choose another run.name, or resume:"
                " auto"
            )
        newer = [[mirror or "", name] for name in names if latest is None or step_of(Path(name)) > step_of(latest)]
        if latest is None and not newer and is_url(settings.resume):
            return [list(split_url(settings.resume))]
        return newer

    candidates = run_on_rank_0(ranks, find_newer)
    found_damage = False
    while candidates:
        url, folder = candidates.pop()
        try:
            fetch(url, folder, root, ranks)
            return
        except StorageError as error:
            if settings.on_error == "stop" or run_on_rank_0(ranks, lambda: newest(root) is None):
                raise
            warn(f"checkpoint.mirror: {error}; resuming from the local checkpoints")
            return
        except DamagedCheckpoint as error:
            if is_url(settings.resume) and not candidates:
                raise
            warn(f"skipping a damaged checkpoint: {url}: {error}")
            found_damage = True
    if found_damage and settings.resume == "auto" and run_on_rank_0(ranks, lambda: newest(root) is None):
        raise ResumeError(
            f"no checkpoint in {mirror} is complete and undamaged: choose another run.name to start from scratch, or a"
            " checkpoint.resume: PATH"
        )


def fetch_replacement(
    settings: CheckpointSection, mirror: str | None, damaged: Path, ranks: RankGroup, warn: Callable[[str], None]
) -> Path | None:
    """Replace the checkpoint `damaged` by the mirror's copy, or else fetch the next older copy that is newer than the
    undamaged local ones. Collective.

    Returns:
        The fetched checkpoint; None if the mirror has no undamaged one.

    Raises:
        UserError: the mirror does not answer and `checkpoint.on_error` is stop.
    """
    if mirror is None:
        return None
    root, last_step = damaged.parent, step_of(damaged)

    def find_candidates() -> list[str]:
        before = newest(root, last_step)
        first_step = -1 if before is None else step_of(before)
        return [name for name in complete_steps(open_store(mirror)) if first_step < step_of(Path(name)) <= last_step]

    try:
        candidates = run_on_rank_0(ranks, find_candidates)
        while candidates:
            folder = candidates.pop()
            try:
                fetched = fetch(mirror, folder, root, ranks)
            except DamagedCheckpoint as error:
                warn(f"skipping a damaged checkpoint: {mirror}: {error}")
                continue
            warn(f"{mirror}/{folder} replaces the damaged checkpoint")
            return fetched
    except StorageError as error:
        if settings.on_error == "stop":
            raise StorageError(f"checkpoint.mirror: {error}") from None
        warn(f"checkpoint.mirror: {error}; resuming from the local checkpoints")
    return None


def fetch_best(mirror: str | None, best: Path, ranks: RankGroup, warn: Callable[[str], None]) -> bool:
    """Fetch the best checkpoint, which is missing locally; return whether the mirror had it. Collective."""
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
    """Download checkpoint `folder` of the store at `url` to `root/folder`; every rank reads its share. Collective.

    Raises on every rank: DamagedCheckpoint if the data are not those that were saved, StorageError.
    """
    text = run_on_rank_0(ranks, lambda: _read_manifest(open_store(url), folder).decode())
    manifest = parse_manifest(text.encode(), f"{url}/{folder}/{MANIFEST}")
    target = root / folder

    def finish(partial: Path, _: list[None]) -> None:
        write_file(partial / MANIFEST, text.encode())

    publish_together(
        target,
        ranks,
        prepare=lambda partial: _create_files(manifest, partial, manifest.files),
        write=lambda partial: _fetch_share(open_store(url), manifest, manifest.files, (folder, partial), ranks),
        finish=finish,
        replace=True,  # an existing directory is damaged
    )
    return target


@contextmanager
def fetched_weights(url: str, output: Path, all_files: bool) -> Iterator[Path]:
    """Download the checkpoint at `url` into a temporary directory next to `output`.

    Args:
        all_files: also download the moments; otherwise their files have their size, but no content.
    """
    parent, folder = split_url(url)
    store = open_store(parent)
    data = _read_manifest(store, folder)
    manifest = parse_manifest(data, f"{url}/{MANIFEST}")
    names = {name for name in manifest.files if all_files or not name.startswith("exp_avg")}
    target = output.resolve().with_name(f"{output.name}.fetched")
    with writing(target):
        clean_leftovers(target.parent, re.compile(re.escape(target.name)))
        directory = begin_alone(target)
    try:
        _create_files(manifest, directory, names)
        _fetch_share(store, manifest, names, (folder, directory), SingleRank())
        write_file(directory / MANIFEST, data)
        yield directory
    finally:
        remove_directory(directory)


def _read_manifest(store: Store, folder: str) -> bytes:
    name = f"{folder}/{MANIFEST}"
    size_bytes = store.list().get(name)
    if size_bytes is None:
        raise DamagedCheckpoint(f"{folder}: no complete checkpoint there: it has no {MANIFEST}")
    return store.read(name, 0, size_bytes)


def _create_files(manifest: Manifest, directory: Path, names: Collection[str]) -> None:
    """Create all files at their size; they are sparse until their content is written. Check the space for `names`."""
    check_space(directory, sum(manifest.files[name].bytes for name in names))
    for name, record in manifest.files.items():
        with writing(directory / name), (directory / name).open("xb") as file:
            file.truncate(record.bytes)


def _fetch_share(
    store: Store, manifest: Manifest, names: Collection[str], route: tuple[str, Path], ranks: RankGroup
) -> None:
    """Download this rank's share of the files `names`; the route leads from a folder of the store to a directory."""
    folder, directory = route

    def fetch_block(item: FileRange) -> None:
        data = verified_block(store.read(f"{folder}/{item.name}", item.start, item.stop), manifest, item, item.start)
        with writing(directory / item.name), (directory / item.name).open("r+b") as file:
            file.seek(item.start)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    ranges = split_files(manifest, names, lambda _: BLOCK_BYTES)
    transfer_in_threads(fetch_block, share_of_rank(ranges, ranks.rank, ranks.world_size))
