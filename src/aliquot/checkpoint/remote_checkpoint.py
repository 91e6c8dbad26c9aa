"""The checkpoints in a store: which are complete, how one is copied there, and how one is fetched.

step-00000100/ holds the same files as the local directory. manifest.json is written last and removed first: what has
none is no checkpoint. Each rank copies its own ranges of files; a range ends where a block of checksums does.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aliquot.checkpoint.directories import directory_of, is_name
from aliquot.core.errors import DamagedCheckpoint, StorageError, TrainingError, UsageError, writing
from aliquot.core.on_rank_0 import Alone, RankGroup, on_first
from aliquot.stores.base import Store
from aliquot.stores.open_store import open_store
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
_THREADS = 2  # of a rank; each holds a block, or a part of a multipart upload


@dataclass(frozen=True)
class Range:
    """Part `index` of a file: bytes [start, stop)."""

    name: str
    index: int
    start: int
    stop: int


def complete_steps(store: Store) -> list[str]:
    """The names of all checkpoints that are complete, oldest first."""
    found = [name.removesuffix(f"/{MANIFEST}") for name in store.list() if name.endswith(f"/{MANIFEST}")]
    return sorted((name for name in found if is_name(name)), key=lambda name: int(name.removeprefix("step-")))


class Copy:
    """A checkpoint on its way to a store: `prepare` on rank 0, `send` on every rank, `publish` on rank 0."""

    def __init__(self, directory: Path, store: Store, rank: int, world_size: int) -> None:
        self._directory = directory
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._stopped = False
        self.sent_bytes = 0

    def prepare(self, anew: bool = False) -> dict[str, str] | None:
        """Remove what killed processes left, and begin; a token a file. None: the store has this checkpoint, unless it
        is to be copied `anew`."""
        store, folder = self._store, self._directory.name
        there = store.list()
        if not anew and self._has(there):
            return None
        store.abort()
        complete = {name.partition("/")[0] for name in there if name.endswith(f"/{MANIFEST}")} - {folder}
        _remove(store, (name for name in there if _folder(name) and _folder(name) not in complete))
        files = read_manifest(self._directory).files
        return {name: store.begin(f"{folder}/{name}", record.bytes) for name, record in files.items()}

    def _has(self, there: Mapping[str, int]) -> bool:
        """Whether the store, with files of such sizes, has the same manifest, and every file as large as that says."""
        folder, manifest = self._directory.name, (self._directory / MANIFEST).read_bytes()
        sizes = {name: record.bytes for name, record in read_manifest(self._directory).files.items()}
        sizes[MANIFEST] = len(manifest)
        if any(there.get(f"{folder}/{name}") != size for name, size in sizes.items()):
            return False
        return self._store.read(f"{folder}/{MANIFEST}", 0, len(manifest)) == manifest

    def send(self, tokens: Mapping[str, str]) -> list[tuple[str, int, str]]:
        """Copy this rank's ranges: name, part and receipt of each."""
        manifest = read_manifest(self._directory)
        own = _share(_ranges(manifest, manifest.files, self._store.part_bytes), self._rank, self._world_size)

        def send(part: Range) -> tuple[str, int, str]:
            name = f"{self._directory.name}/{part.name}"
            blocks = self._blocks(manifest, part)
            receipt = self._store.put_part(name, tokens[part.name], part.index, part.start, blocks)
            if not self._store.compares:
                for start in range(part.start, part.stop, BLOCK_BYTES):
                    _checked(self._store.read(name, start, min(start + BLOCK_BYTES, part.stop)), manifest, part, start)
            return part.name, part.index, receipt

        return _in_threads(send, own)

    def publish(
        self, tokens: Mapping[str, str], sent: Sequence[tuple[str, int, str]], keep: int, best: int | None = None
    ) -> None:
        """All ranks have sent theirs: complete the files, look at them, write the manifest; then retention, from which
        the checkpoint of step `best` is exempt."""
        store, folder = self._store, self._directory.name
        manifest = read_manifest(self._directory)
        receipts: dict[str, list[tuple[int, str]]] = {name: [] for name in tokens}
        for name, index, receipt in sent:
            receipts[name].append((index, receipt))
        for name, token in tokens.items():
            store.complete(f"{folder}/{name}", token, [receipt for _, receipt in sorted(receipts[name])])
        there = store.list()
        for name, record in manifest.files.items():
            if (found := there.get(f"{folder}/{name}")) != record.bytes:
                raise StorageError(f"{folder}/{name} has {found} bytes there instead of {record.bytes}")
        store.put(f"{folder}/{MANIFEST}", (self._directory / MANIFEST).read_bytes())
        kept = {folder, *(directory_of(Path(), step).name for step in (best,) if step is not None)}
        old = set(complete_steps(store)[:-keep]) - kept
        _remove(store, (name for name in there if _folder(name) in old))

    def stop(self) -> None:
        """Nothing more need be sent."""
        self._stopped = True

    def _blocks(self, manifest: Manifest, part: Range) -> Iterator[bytes]:
        path = self._directory / part.name
        with path.open("rb", buffering=0) as file:
            for start in range(part.start, part.stop, BLOCK_BYTES):
                if self._stopped:
                    raise TrainingError("this copy was given up")
                data = os.pread(file.fileno(), min(BLOCK_BYTES, part.stop - start), start)
                yield _checked(data, manifest, part, start)
                self.sent_bytes += len(data)


def fetch(url: str, folder: str, root: Path, ranks: RankGroup) -> Path:
    """Checkpoint `folder` of the store at `url` becomes `root/folder`, every rank reading its share once. Collective.

    Raises on every rank: DamagedCheckpoint where what arrives is not what was saved, StorageError.
    """
    text = on_first(ranks, lambda: _manifest_of(open_store(url), folder).decode())
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
        _fetch(store, folder, manifest, directory, wanted, Alone())
        write_file(directory / MANIFEST, data)
        yield directory
    finally:
        remove_directory(directory)


def split_url(url: str) -> tuple[str, str]:
    """The store and the name of the checkpoint at `url`. Raises UserError where it does not name one."""
    store, _, folder = url.rstrip("/").rpartition("/")
    if not is_name(folder):
        raise UsageError(f"{url} names no checkpoint: give one like s3://BUCKET/PREFIX/RUN/step-00000100")
    return store, folder


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
        data = _checked(store.read(f"{folder}/{part.name}", part.start, part.stop), manifest, part, part.start)
        with writing(directory / part.name), (directory / part.name).open("r+b") as file:
            file.seek(part.start)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    _in_threads(fetch_block, _share(_ranges(manifest, wanted, lambda _: BLOCK_BYTES), ranks.rank, ranks.world_size))


def _ranges(manifest: Manifest, names: Collection[str], part_bytes: Callable[[int], int]) -> list[Range]:
    """All parts of all files, the same on every rank; a file without content has one, too."""
    found = []
    for name in sorted(names):
        size_bytes = manifest.files[name].bytes
        length = part_bytes(size_bytes)
        for index, start in enumerate(range(0, max(1, size_bytes), length)):
            found.append(Range(name, index, start, min(start + length, size_bytes)))
    return found


def _share(ranges: Sequence[Range], rank: int, world_size: int) -> list[Range]:
    """Those of a rank: neighbours, about as many bytes as every other rank has."""
    total, before, own = max(1, sum(part.stop - part.start for part in ranges)), 0, []
    for part in ranges:
        middle = before + (part.stop - part.start) / 2
        if min(world_size - 1, int(middle * world_size / total)) == rank:
            own.append(part)
        before += part.stop - part.start
    return own


def _checked(data: bytes, manifest: Manifest, part: Range, start: int) -> bytes:
    """Raises DamagedCheckpoint unless `data` are those of the block at `start`."""
    crc32 = manifest.files[part.name].crc32
    if (start < part.stop and zlib.crc32(data) != crc32[start // BLOCK_BYTES]) or len(data) > part.stop - start:
        raise DamagedCheckpoint(f"{part.name}: the block at byte {start} is not what was saved")
    return data


def _in_threads(work: Callable[[Range], T], ranges: Sequence[Range]) -> list[T]:
    """`work` for each, a few at once; after one that failed no other begins."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="aliquot-mirror") as threads:
        futures: list[Future[T]] = [threads.submit(work, part) for part in ranges]
        try:
            return [future.result() for future in futures]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _folder(name: str) -> str | None:
    """The checkpoint that a file belongs to; None: it is not of one, and not ours."""
    folder, slash, _ = name.partition("/")
    return folder if slash and is_name(folder) else None


def _remove(store: Store, names: Iterator[str]) -> None:
    """Manifests first, in a request of their own: what has none is no checkpoint."""
    every = list(names)
    manifests = [name for name in every if name.endswith(f"/{MANIFEST}")]
    store.remove(manifests)
    store.remove([name for name in every if name not in set(manifests)])
