"""Expand paths that users write, open files of strangers and of runs, and publish files atomically.

A reader of a published file sees the old content or the new content, never a part. Files of a run are opened without
following links, because another user may have placed a link.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal

from aliquot.core.errors import UnfitFileError

LIMIT_BYTES = 100_000_000  # safetensors' limit for a header; tokenizers have up to 35 MB
_HUB_TIMEOUT_S = 15.0  # for the next bytes; the client tries several times
_HUB_BYTES_PER_S = 256  # the least that a hub sends; one block of a fast hub is 64 KiB
RUN_FILE_BYTES = 1 << 30  # limit for a file of a run: metrics of millions of steps
# Where a link may lead: out of the directory of the link only for a file that the user has named, and nowhere for a
# file that only aliquot writes.
Links = Literal["anywhere", "inside", "none"]
_UNFIT = {
    errno.ELOOP: "a link, which is not followed here: replace it by the file",
    errno.ENXIO: "not a regular file",  # a FIFO that nobody reads, or a socket
}
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"  # in the cache of the hub: snapshots/REVISION/FILE is a link into blobs


def with_home(path: str | Path) -> Path:
    """Replace ~ and ~NAME in `path`; return an unknown ~NAME unchanged, so that an error can name it as missing."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (the method of Path refuses an unknown name)


def looks_local(model: str) -> bool:
    """Return whether `model` is a path and not a hub id, which has the form `owner/name`."""
    return with_home(model).exists() or model.startswith((".", "/", "~")) or model.count("/") != 1


def hub_advice(name: str, kind: str = "model") -> str:
    """Return what a user can do about a model, tokenizer or dataset that the Hugging Face hub did not serve."""
    download = f"hf download {name}{' --repo-type dataset' if kind == 'dataset' else ''}"
    return f"Check the name, run `{download}` where the hub is reachable, or set HF_TOKEN for a gated {kind}"


def limit_hub_time() -> None:
    """Let the hub's client give up on a hub that sends nothing or very little; by default, it waits for ever."""
    from huggingface_hub import get_session

    session = get_session()
    session.event_hooks = {
        "request": [*session.event_hooks["request"], _limit_request],
        "response": [_limit_response],
    }


def _limit_request(request: Any) -> None:
    limits = request.extensions["timeout"]  # None: for ever
    request.extensions["timeout"] = {kind: limit or _HUB_TIMEOUT_S for kind, limit in limits.items()}


def _limit_response(response: Any) -> None:
    """Let reading the content of `response` raise ReadTimeout while fewer than _HUB_BYTES_PER_S bytes arrive."""
    http = import_module(type(response).__module__.partition(".")[0])  # httpx, or its successor in newer clients
    stream = response.stream

    class LimitedStream(http.SyncByteStream):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[bytes]:
            received, begin = 0, time.monotonic()
            for block in stream:
                received += len(block)
                if (seconds := time.monotonic() - begin) > _HUB_TIMEOUT_S:
                    if received < seconds * _HUB_BYTES_PER_S:
                        raise http.ReadTimeout(f"the hub sent {received} bytes in {seconds:.0f} s")
                    received, begin = 0, time.monotonic()
                yield block

        def close(self) -> None:
            stream.close()

    response.stream = LimitedStream()


def cache_root(configured: Path | None = None) -> Path:
    """Return the cache of tokens, plans and measured rates: `configured`, $ALIQUOT_CACHE or ~/.cache/aliquot."""
    return with_home(configured or os.environ.get("ALIQUOT_CACHE") or "~/.cache/aliquot").absolute()


def open_regular(path: Path, links: Links = "inside", limit: int | None = None) -> BufferedReader:
    """Open a regular file of at most `limit` bytes for reading. Raises OSError; for any other file UnfitFileError.

    Nothing is read before the checks, and a FIFO in place of the file is not waited for.
    """
    target = path if links == "none" else resolve_link(path, None if links == "anywhere" else path.parent)
    descriptor = _open_itself(target, os.O_RDONLY)
    size_bytes = os.fstat(descriptor).st_size
    if limit is not None and size_bytes > limit:
        os.close(descriptor)
        raise UnfitFileError(f"{size_bytes} bytes, which is more than {limit}")
    return os.fdopen(descriptor, "rb")


def read_small_file(path: Path, limit: int = LIMIT_BYTES, links: Links = "inside") -> bytes:
    """Return the content of a file that `open_regular` opens. Raises OSError."""
    with open_regular(path, links, limit) as file:
        data = file.read(limit + 1)
    if len(data) > limit:  # files of /proc have no size
        raise UnfitFileError(f"larger than {limit} bytes")
    return data


def resolve_link(path: Path, root: Path | None) -> Path:
    """Return the path to which `path` leads. Raises UnfitFileError if it is outside of the directory `root`.

    If `root` is a snapshot of the hub's cache, the path may be in the blobs of the cache instead.
    """
    target = Path(os.path.realpath(path))
    if root is None:
        return target
    root = Path(os.path.realpath(root))
    blobs = root.parents[1] / _BLOBS if root.parent.name == _SNAPSHOTS else root
    if not target.is_relative_to(root) and not target.is_relative_to(blobs):
        raise UnfitFileError(f"a link to {target}, which is outside of its directory: replace the link by a copy")
    return target


def _open_itself(path: Path, flags: int, permissions: int = 0o666) -> int:
    """Open a regular file, without following a link, and without waiting for the other end of a FIFO."""
    try:
        # O_NONBLOCK has no effect on a regular file.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, permissions)
    except OSError as error:
        if error.errno not in _UNFIT:
            raise
        raise UnfitFileError(_UNFIT[error.errno]) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnfitFileError("not a regular file")
    return descriptor


def open_unlinked(
    path: Path, mode: Literal["w", "x", "a", "wb", "ab", "ab+"], permissions: int = 0o666, **options: Any
) -> IO[Any]:
    """Open a file of a run for writing, as `open` does. Raises OSError; for a link or a FIFO UnfitFileError.

    Mode "w" replaces an existing file by a new file, so that other hard links to the old file keep its content.
    `permissions` are the mode bits of a new file, before the umask: 0o600 for a secret.
    """
    flags = (os.O_RDWR if "+" in mode else os.O_WRONLY) | os.O_CREAT
    flags |= os.O_APPEND if "a" in mode else os.O_EXCL
    if "w" in mode:
        path.unlink(missing_ok=True)
    return os.fdopen(_open_itself(path, flags, permissions), mode, **options)


_POINTERS = {
    b"version https://git-lfs.github.com/spec/": "git-lfs pointer, not the file itself: fetch it first (git lfs pull)",
    b"/annex/objects/": "git-annex pointer, not the file itself: fetch it first (git annex get)",
}


def pointer_message(start: bytes) -> str | None:
    """Return a message if `start` is the beginning of a git-lfs or git-annex pointer file, otherwise None."""
    return next((f"a {message}" for beginning, message in _POINTERS.items() if start.startswith(beginning)), None)


def flush_to_disk(file: IO[Any]) -> None:
    """Write the buffered data of an open file, and wait until the disk has the file."""
    file.flush()
    os.fsync(file.fileno())


def publish_text(path: Path, text: str) -> None:
    """Replace `path` by a file of `text` atomically: write a draft, force the draft to disk, rename it."""
    publish_bytes(path, text.encode())


def publish_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by a file of `data` atomically."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open_unlinked(draft, "wb") as file:
            file.write(data)
            flush_to_disk(file)
        draft.replace(path)
    except OSError:  # remove the draft, for example from a full disk
        with suppress(OSError):
            draft.unlink()
        raise
