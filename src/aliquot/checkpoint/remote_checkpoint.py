"""List, upload and download checkpoints in a store; each rank transfers its share of the bytes.

A checkpoint in the store, such as step-00000100/, has the same files as the local directory. manifest.json is written
last and removed first, so that a directory without manifest.json is incomplete. Ranks transfer ranges of files, which
end at the boundaries of checksum blocks.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from aliquot.checkpoint.directories import NAME, directory_of
from aliquot.checkpoint.retention import Retention
from aliquot.core.errors import DamagedCheckpoint, StorageError, TrainingError, UsageError, writing
from aliquot.core.on_rank_0 import RankGroup, SingleRank, run_on_rank_0
from aliquot.core.small_files import flush_to_disk, open_regular, read_small_file
from aliquot.stores.store import Store, open_store
from aliquot.tensor_io.checksums import BLOCK_BYTES
from aliquot.tensor_io.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from aliquot.tensor_io.publish import (
    begin_alone,
    check_space,
    clean_leftovers,
    publish_together,
    remove_directory,
    write_file,
)

T = TypeVar("T")
Receipt = tuple[str, int, str]  # file name, index of the range, receipt of the store
_THREADS = 2  # per rank; each thread holds a block, or a part of a multipart upload, in memory


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, stop) of a file, as the range with number `index`."""

    name: str
    index: int
    start: int
    stop: int


def complete_steps(store: Store) -> list[str]:
    """List the names of all complete checkpoints in the store, oldest first."""
    folders = [name.removesuffix(f"/{MANIFEST}") for name in store.list() if name.endswith(f"/{MANIFEST}")]
    return sorted((name for name in folders if NAME.fullmatch(name)), key=lambda name: int(name.removeprefix("step-")))


def split_url(url: str) -> tuple[str, str]:
    """Split the URL of a checkpoint into the URL of the store and the name. Raises UserError for any other URL."""
    store, _, folder = url.rstrip("/").rpartition("/")
    if not NAME.fullmatch(folder):
        raise UsageError(f"{url} names no checkpoint: give one like s3://BUCKET/PREFIX/RUN/step-00000100")
    return store, folder


@dataclass
class Upload:
    """The upload of one checkpoint: `prepare` on rank 0, `send` on every rank, `publish` on rank 0."""

    directory: Path
    store: Store
    ranks: RankGroup
    sent_bytes: int = 0
    is_stopped: bool = False

    def prepare(self, replace: bool = False) -> dict[str, str] | None:
        """Remove the partial uploads of killed processes, begin all files, and return an upload token for each file.

        Returns None, without any change, if the store has this checkpoint and `replace` is false.
        """
        store, folder = self.store, self.directory.name
        stored_bytes = store.list()
        if not replace and self._is_in_store(stored_bytes):
            return None
        store.abort()
        complete = {name.partition("/")[0] for name in stored_bytes if name.endswith(f"/{MANIFEST}")} - {folder}
        _remove(store, (name for name in stored_bytes if _folder_of(name) not in {*complete, None}))
        files = read_manifest(self.directory).files
        return {name: store.begin(f"{folder}/{name}", record.bytes) for name, record in files.items()}

    def _is_in_store(self, stored_bytes: Mapping[str, int]) -> bool:
        """Return whether the store has the same manifest, and every file with the size that the manifest records."""
        manifest = read_small_file(self.directory / MANIFEST)
        folder, files = self.directory.name, read_manifest(self.directory).files
        sizes = {name: record.bytes for name, record in files.items()} | {MANIFEST: len(manifest)}
        has_sizes = all(stored_bytes.get(f"{folder}/{name}") == size for name, size in sizes.items())
        return has_sizes and _read(self.store, f"{folder}/{MANIFEST}", 0, len(manifest)) == manifest

    def send(self, tokens: Mapping[str, str]) -> list[Receipt]:
        """Send this rank's ranges of the files, and return the receipts of the store."""
        manifest = read_manifest(self.directory)

        def send_range(item: FileRange) -> Receipt:
            name = f"{self.directory.name}/{item.name}"
            receipt = self.store.put_part(name, tokens[item.name], item.index, item.start, self._blocks(manifest, item))
            if not self.store.verifies_checksums:
                for start in range(item.start, item.stop, BLOCK_BYTES):
                    data = _read(self.store, name, start, min(start + BLOCK_BYTES, item.stop))
                    _verified_block(data, manifest, item, start)
            return item.name, item.index, receipt

        return _transfer(send_range, _split_files(manifest, manifest.files, self.store.part_bytes), self.ranks)

    def publish(self, tokens: Mapping[str, str], sent: Sequence[Receipt], retention: Retention) -> None:
        """Complete the files with the receipts of all ranks, write the manifest, then remove old checkpoints."""
        store, folder = self.store, self.directory.name
        manifest = read_manifest(self.directory)
        in_order = sorted(sent)
        for name, token in tokens.items():
            store.complete(f"{folder}/{name}", token, [receipt for file, _, receipt in in_order if file == name])
        sizes = store.list()
        for name, record in manifest.files.items():
            if (size := sizes.get(f"{folder}/{name}")) != record.bytes:
                raise StorageError(f"{folder}/{name} has {size} bytes instead of {record.bytes}")
        store.put(f"{folder}/{MANIFEST}", read_small_file(self.directory / MANIFEST))
        retained = {folder} if retention.best is None else {folder, directory_of(Path(), retention.best).name}
        old = set(complete_steps(store)[: -retention.keep]) - retained
        _remove(store, (name for name in sizes if _folder_of(name) in old))

    def stop(self) -> None:
        """End `send` at its next block."""
        self.is_stopped = True

    def _blocks(self, manifest: Manifest, item: FileRange) -> Iterator[bytes]:
        with open_regular(self.directory / item.name) as file:
            for start in range(item.start, item.stop, BLOCK_BYTES):
                if self.is_stopped:
                    raise TrainingError("this upload was abandoned")
                data = os.pread(file.fileno(), min(BLOCK_BYTES, item.stop - start), start)
                yield _verified_block(data, manifest, item, start)
                self.sent_bytes += len(data)


def fetch(url: str, folder: str, root: Path, ranks: RankGroup) -> Path:
    """Download checkpoint `folder` of the store at `url` to `root/folder`; every rank reads its share. Collective.

    Raises on every rank: DamagedCheckpoint if the data do not match the manifest, StorageError.
    """
    data = run_on_rank_0(ranks, lambda: _read_manifest(open_store(url), folder).decode()).encode()
    manifest = parse_manifest(data, f"{url}/{folder}/{MANIFEST}")
    target = root / folder
    publish_together(
        target,
        ranks,
        prepare=lambda partial: _create_files(manifest, partial, manifest.files),
        write=lambda partial: _fetch_share(open_store(url), manifest, manifest.files, (folder, partial), ranks),
        finish=lambda partial, _: write_file(partial / MANIFEST, data),
        keep_former=lambda former: False,  # callers fetch only if the local directory is missing or damaged
    )
    return target


@contextmanager
def fetched_weights(url: str, output: Path, all_files: bool) -> Iterator[Path]:
    """Download the checkpoint at `url` into a temporary directory next to `output`, for the duration of the context.

    Without `all_files` the files of the moments are not downloaded: they have the right size, but no content.
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
    return _read(store, name, 0, size_bytes)


def _read(store: Store, name: str, start: int, stop: int) -> bytes:
    """Read a file of a checkpoint. Raises DamagedCheckpoint if the file is missing."""
    try:
        return store.read(name, start, stop)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{name} is not there") from None


def _create_files(manifest: Manifest, directory: Path, names: Collection[str]) -> None:
    """Create all files of a checkpoint as sparse files of the right size, after checking the disk space for `names`."""
    check_space(directory, sum(manifest.files[name].bytes for name in names))
    for name, record in manifest.files.items():
        with writing(directory / name), (directory / name).open("xb") as file:
            file.truncate(record.bytes)


def _fetch_share(
    store: Store, manifest: Manifest, names: Collection[str], route: tuple[str, Path], ranks: RankGroup
) -> None:
    """Download this rank's share of the files `names`; `route` is (folder in the store, local directory)."""
    folder, directory = route

    def fetch_block(item: FileRange) -> None:
        content = _read(store, f"{folder}/{item.name}", item.start, item.stop)
        data = _verified_block(content, manifest, item, item.start)
        with writing(directory / item.name), (directory / item.name).open("r+b") as file:
            file.seek(item.start)
            file.write(data)
            flush_to_disk(file)

    _transfer(fetch_block, _split_files(manifest, names, lambda _: BLOCK_BYTES), ranks)


def _split_files(manifest: Manifest, names: Iterable[str], range_bytes: Callable[[int], int]) -> list[FileRange]:
    """Split files into ranges of `range_bytes(size of the file)` bytes; an empty file has one empty range."""
    ranges = []
    for name in sorted(names):
        size_bytes = manifest.files[name].bytes
        length = range_bytes(size_bytes)
        starts = enumerate(range(0, max(1, size_bytes), length))
        ranges += [FileRange(name, index, start, min(start + length, size_bytes)) for index, start in starts]
    return ranges


def _transfer(work: Callable[[FileRange], T], ranges: Sequence[FileRange], ranks: RankGroup) -> list[T]:
    """Run `work` for this rank's share of `ranges` in a few threads; after a failure no further range begins.

    The ranges of a rank are adjacent, and all ranks get about the same number of bytes.
    """
    sizes = [item.stop - item.start for item in ranges]
    middles = [end - size / 2 for size, end in zip(sizes, accumulate(sizes), strict=True)]
    owners = [min(ranks.world_size - 1, int(middle * ranks.world_size / max(1, sum(sizes)))) for middle in middles]
    share = [item for item, owner in zip(ranges, owners, strict=True) if owner == ranks.rank]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="aliquot-mirror") as threads:
        futures: list[Future[T]] = [threads.submit(work, item) for item in share]
        try:
            return [future.result() for future in futures]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _verified_block(data: bytes, manifest: Manifest, file_range: FileRange, start: int) -> bytes:
    """Return `data`. Raises DamagedCheckpoint unless `data` match the checksum of the block at byte `start`."""
    crc32 = manifest.files[file_range.name].crc32
    is_damaged = start < file_range.stop and zlib.crc32(data) != crc32[start // BLOCK_BYTES]
    if is_damaged or len(data) > file_range.stop - start:
        raise DamagedCheckpoint(f"{file_range.name}: the block at byte {start} differs from the saved block")
    return data


def _folder_of(name: str) -> str | None:
    """Return the name of the checkpoint to which a file belongs; None for a file that is not part of a checkpoint."""
    folder, slash, _ = name.partition("/")
    return folder if slash and NAME.fullmatch(folder) else None


def _remove(store: Store, names: Iterable[str]) -> None:
    """Remove files; first the manifests, in a separate request, so that no partial checkpoint has a manifest."""
    all_names = list(names)
    manifests = [name for name in all_names if name.endswith(f"/{MANIFEST}")]
    store.remove(manifests)
    store.remove([name for name in all_names if name not in manifests])
