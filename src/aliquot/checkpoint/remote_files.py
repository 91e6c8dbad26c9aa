"""Checkpoints in a store: names, complete checkpoints, and each rank's share of the bytes of their files.

step-00000100/ holds the same files as the local directory. manifest.json is written last and removed first: a directory
without it is no checkpoint. Each rank transfers its own ranges of files; ranges end at boundaries of checksum blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from aliquot.checkpoint.directories import is_name
from aliquot.core.errors import DamagedCheckpoint, UsageError
from aliquot.stores.store import Store
from aliquot.tensor_io.checksums import BLOCK_BYTES
from aliquot.tensor_io.manifest import MANIFEST, Manifest

T = TypeVar("T")
_THREADS = 2  # per rank; each holds a block, or a part of a multipart upload


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, stop) of a file, its range number `index`."""

    name: str
    index: int
    start: int
    stop: int


def complete_steps(store: Store) -> list[str]:
    """List the names of all complete checkpoints, oldest first."""
    folders = [name.removesuffix(f"/{MANIFEST}") for name in store.list() if name.endswith(f"/{MANIFEST}")]
    return sorted((name for name in folders if is_name(name)), key=lambda name: int(name.removeprefix("step-")))


def split_url(url: str) -> tuple[str, str]:
    """Split the URL of a checkpoint into its store and its name. Raises UserError for any other URL."""
    store, _, folder = url.rstrip("/").rpartition("/")
    if not is_name(folder):
        raise UsageError(f"{url} names no checkpoint: give one like s3://BUCKET/PREFIX/RUN/step-00000100")
    return store, folder


def split_files(manifest: Manifest, names: Collection[str], range_bytes: Callable[[int], int]) -> list[FileRange]:
    """Split files into ranges, the same on every rank; an empty file has one range, too.

    Args:
        range_bytes: the length of the ranges of a file of the given size.
    """
    ranges = []
    for name in sorted(names):
        size_bytes = manifest.files[name].bytes
        length = range_bytes(size_bytes)
        for index, start in enumerate(range(0, max(1, size_bytes), length)):
            ranges.append(FileRange(name, index, start, min(start + length, size_bytes)))
    return ranges


def share_of_rank(ranges: Sequence[FileRange], rank: int, world_size: int) -> list[FileRange]:
    """Return the adjacent ranges of one rank; all ranks get about the same number of bytes."""
    total_bytes, offset, share = max(1, sum(item.stop - item.start for item in ranges)), 0, []
    for item in ranges:
        middle = offset + (item.stop - item.start) / 2
        if min(world_size - 1, int(middle * world_size / total_bytes)) == rank:
            share.append(item)
        offset += item.stop - item.start
    return share


def verified_block(data: bytes, manifest: Manifest, file_range: FileRange, start: int) -> bytes:
    """Return `data`. Raises DamagedCheckpoint unless they are the block at byte `start` of the file."""
    crc32 = manifest.files[file_range.name].crc32
    is_damaged = start < file_range.stop and zlib.crc32(data) != crc32[start // BLOCK_BYTES]
    if is_damaged or len(data) > file_range.stop - start:
        raise DamagedCheckpoint(f"{file_range.name}: the block at byte {start} is not what was saved")
    return data


def transfer_in_threads(work: Callable[[FileRange], T], ranges: Sequence[FileRange]) -> list[T]:
    """Run `work` for each range, a few at once; after a failure no further range begins."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="aliquot-mirror") as threads:
        futures: list[Future[T]] = [threads.submit(work, item) for item in ranges]
        try:
            return [future.result() for future in futures]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
