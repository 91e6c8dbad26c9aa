"""The checkpoints in a store: which are complete, how one is copied there, and how one is fetched.

step-00000100/ holds the same files as the local directory. manifest.json is written last and removed first: what has
none is no checkpoint. Each rank copies its own ranges of files; a range ends where a block of checksums does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from aliquot.checkpoint.directories import is_name
from aliquot.core.errors import DamagedCheckpoint, UsageError
from aliquot.stores.base import Store
from aliquot.tensor_io.checksums import BLOCK_BYTES
from aliquot.tensor_io.manifest import MANIFEST, Manifest

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


def split_url(url: str) -> tuple[str, str]:
    """The store and the name of the checkpoint at `url`. Raises UserError where it does not name one."""
    store, _, folder = url.rstrip("/").rpartition("/")
    if not is_name(folder):
        raise UsageError(f"{url} names no checkpoint: give one like s3://BUCKET/PREFIX/RUN/step-00000100")
    return store, folder


def ranges_of(manifest: Manifest, names: Collection[str], part_bytes: Callable[[int], int]) -> list[Range]:
    """All parts of all files, the same on every rank; a file without content has one, too."""
    found = []
    for name in sorted(names):
        size_bytes = manifest.files[name].bytes
        length = part_bytes(size_bytes)
        for index, start in enumerate(range(0, max(1, size_bytes), length)):
            found.append(Range(name, index, start, min(start + length, size_bytes)))
    return found


def share_of(ranges: Sequence[Range], rank: int, world_size: int) -> list[Range]:
    """Those of a rank: neighbours, about as many bytes as every other rank has."""
    total, before, own = max(1, sum(part.stop - part.start for part in ranges)), 0, []
    for part in ranges:
        middle = before + (part.stop - part.start) / 2
        if min(world_size - 1, int(middle * world_size / total)) == rank:
            own.append(part)
        before += part.stop - part.start
    return own


def checked(data: bytes, manifest: Manifest, part: Range, start: int) -> bytes:
    """Raises DamagedCheckpoint unless `data` are those of the block at `start`."""
    crc32 = manifest.files[part.name].crc32
    if (start < part.stop and zlib.crc32(data) != crc32[start // BLOCK_BYTES]) or len(data) > part.stop - start:
        raise DamagedCheckpoint(f"{part.name}: the block at byte {start} is not what was saved")
    return data


def in_threads(work: Callable[[Range], T], ranges: Sequence[Range]) -> list[T]:
    """`work` for each, a few at once; after one that failed no other begins."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="aliquot-mirror") as threads:
        futures: list[Future[T]] = [threads.submit(work, part) for part in ranges]
        try:
            return [future.result() for future in futures]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
