"""The secret of a run, by which its processes know each other.

Ranks inherit it from their launcher. Several nodes share it through a file in the run directory, which only its owner
can read, or through the environment of the job. It never crosses a socket.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aliquot.core.errors import LaunchError, storage_error

SECRET = "ALIQUOT_SECRET"
SECRET_FILE = ".secret"  # in the run directory
_FEWEST_BYTES = 32
_MOST_BYTES = 256
_POLL_S = 0.05
_WRITTEN_S = 15.0  # within which a network file system shows a file that another node has written


def new_secret() -> str:
    """Return a secret, or a run id, that nobody can guess."""
    return secrets.token_hex(32)


def common_secret(environ: Mapping[str, str], run_directory: Path | None) -> str:
    """Return the secret that all nodes of a run share, and make it if this node is the first.

    Raises LaunchError if the nodes have nothing in common that could hold it, and StorageError.
    """
    if secret := environ.get(SECRET):
        return secret
    if run_directory is None:
        raise LaunchError(
            "several nodes that share no run directory need a common secret, by which they know each other: set the"
            f" environment variable {SECRET} to the same long random text on every node"
        )
    file = run_directory.absolute() / SECRET_FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as written:
                written.write(f"{new_secret()}\n")
        return _read(file)
    except OSError as error:
        text = f"cannot read the secret that all nodes share: {error.strerror}; or set {SECRET} on every node"
        raise storage_error(text, error, file) from None


def _read(file: Path) -> str:
    """Read what another node may be writing. Raises OSError, and LaunchError for a file that holds no secret."""
    until = time.monotonic() + _WRITTEN_S
    while True:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as read:
            text = read.read(_MOST_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        if text.endswith(b"\n") and len(text) > _FEWEST_BYTES:
            return text.decode("ascii", "replace").strip()
        if time.monotonic() > until:
            raise LaunchError(f"{file} holds no secret: remove it, and start all nodes again")
        time.sleep(_POLL_S)
