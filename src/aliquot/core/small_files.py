"""Expand paths that users write, read small untrusted files, and publish files atomically.

A reader of a published file sees the old content or the new content, never a part. Files of a run are opened without
following links, because another user may have placed a link.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

LIMIT_BYTES = 100_000_000  # safetensors' limit for a header; tokenizers have up to 35 MB
_HUB_TIMEOUT_S = 15.0  # for the next bytes; the client tries several times
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"  # in the cache of the hub: snapshots/REVISION/FILE is a link into blobs


def with_home(path: str | Path) -> Path:
    """Replace ~ and ~NAME in `path`; return an unknown ~NAME unchanged, so that an error can name it as missing."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def looks_local(model: str) -> bool:
    """Return whether `model` is a path and not a hub id, which has the form `owner/name`."""
    return with_home(model).exists() or model.startswith((".", "/", "~")) or model.count("/") != 1


def hub_advice(name: str, kind: str = "model") -> str:
    """Return what a user can do about a model, tokenizer or dataset that the Hugging Face hub did not serve."""
    download = f"hf download {name}{' --repo-type dataset' if kind == 'dataset' else ''}"
    return f"Check the name, run `{download}` where the hub is reachable, or set HF_TOKEN for a gated {kind}"


def limit_hub_time() -> None:
    """Let the hub's client give up on a hub that sends nothing, because its default is to wait for ever."""
    from huggingface_hub import get_session

    session = get_session()
    session.event_hooks = {**session.event_hooks, "request": [*session.event_hooks["request"], _limit_request]}


def _limit_request(request: Any) -> None:
    limits = request.extensions["timeout"]  # None: for ever
    request.extensions["timeout"] = {kind: limit or _HUB_TIMEOUT_S for kind, limit in limits.items()}


def cache_root(configured: Path | None = None) -> Path:
    """Return the cache of tokens, plans and measured rates: `configured`, $ALIQUOT_CACHE or ~/.cache/aliquot."""
    return with_home(configured or os.environ.get("ALIQUOT_CACHE") or "~/.cache/aliquot").absolute()


def read_small_file(path: Path, limit: int = LIMIT_BYTES, anywhere: bool = False, follow_links: bool = True) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises OSError, and ValueError for any other file.

    `anywhere` allows a link that leads out of the file's directory, for a file that the user has named. Without
    `follow_links`, any link raises OSError.
    """
    if follow_links and not anywhere:
        refuse_link(path, path.parent)
    # Without O_NONBLOCK, opening a FIFO could wait forever. The flag has no effect on a regular file.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        _refuse_unfit(os.fstat(file.fileno()), limit)
        data = file.read(limit + 1)
    if len(data) > limit:  # files of /proc have no size
        raise ValueError(f"larger than {limit} bytes")
    return data


def check_small(path: Path) -> None:
    """Raise ValueError unless `path`, which a library will read, is a regular file of at most LIMIT_BYTES bytes."""
    _refuse_unfit(path.stat(), LIMIT_BYTES)


def refuse_link(path: Path, directory: Path) -> None:
    """Raise ValueError if `path` leads out of `directory`, or out of the hub's cache if `directory` is a snapshot."""
    target, root = path.resolve(), directory.resolve()
    blobs = root.parents[1] / _BLOBS if root.parent.name == _SNAPSHOTS else root
    if not target.is_relative_to(root) and not target.is_relative_to(blobs):
        raise ValueError(f"a link to {target}, which is outside of its directory: replace the link by a copy")


def _refuse_unfit(status: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > limit:
        raise ValueError(f"{status.st_size} bytes, which is more than {limit}")


def open_unlinked(
    path: Path, mode: Literal["w", "x", "a", "wb", "ab", "ab+"], permissions: int = 0o666, **options: Any
) -> IO[Any]:
    """Open a file of a run for writing, as `open` does, but never through a link, which raises OSError.

    Mode "w" replaces an existing file by a new file, so that other hard links to the old file keep its content.
    `permissions` are the mode bits of a new file, before the umask: 0o600 for a secret.
    """
    flags = (os.O_RDWR if "+" in mode else os.O_WRONLY) | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    if "a" in mode:
        flags |= os.O_APPEND
    else:
        flags |= os.O_EXCL
        if "w" in mode:
            with suppress(FileNotFoundError):
                path.unlink()
    return os.fdopen(os.open(path, flags, permissions), mode, **options)


_POINTERS = {
    b"version https://git-lfs.github.com/spec/": "git-lfs pointer, not the file itself: fetch it first (git lfs pull)",
    b"/annex/objects/": "git-annex pointer, not the file itself: fetch it first (git annex get)",
}


def pointer_message(start: bytes) -> str | None:
    """Return a message if `start` is the beginning of a git-lfs or git-annex pointer file, otherwise None."""
    return next((f"a {message}" for beginning, message in _POINTERS.items() if start.startswith(beginning)), None)


def publish_text(path: Path, text: str) -> None:
    """Replace `path` by a file of `text` atomically: write a draft, force the draft to disk, rename it."""
    publish_bytes(path, text.encode())


def publish_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by a file of `data` atomically."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open_unlinked(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:  # remove the draft, for example from a full disk
        with suppress(OSError):
            draft.unlink()
        raise
