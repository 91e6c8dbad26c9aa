"""The secret of a run, by which the processes of the run recognise each other.

Ranks inherit the secret from their launcher. Several nodes share it through a file in the run directory that only its
owner can read, or through the environment of the job. The secret never crosses a socket.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aliquot.core.errors import LaunchError, storage_error
from aliquot.core.small_files import open_unlinked, read_small_file

SECRET_VARIABLE = "ALIQUOT_SECRET"
SECRET_FILE = ".secret"  # in the run directory
_SECRET_BYTES = 32
_MAX_FILE_BYTES = 256
_POLL_S = 0.05
_VISIBLE_S = 15.0  # a network file system shows a file within this time after another node has written it


def new_secret() -> str:
    """Return a random string that nobody can guess, for a secret or a run id."""
    return secrets.token_hex(_SECRET_BYTES)


def common_secret(environ: Mapping[str, str], run_directory: Path | None) -> str:
    """Return the secret that all nodes of a run share; the first node creates the secret.

    Raises LaunchError and StorageError.
    """
    if secret := environ.get(SECRET_VARIABLE):
        return secret
    if run_directory is None:
        raise LaunchError(
            "several nodes that share no run directory need a common secret, by which they know each other: set the"
            f" environment variable {SECRET_VARIABLE} to the same long random text on every node"
        )
    file = run_directory.absolute() / SECRET_FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open_unlinked(file, "x", permissions=0o600, encoding="ascii") as output:
            output.write(f"{new_secret()}\n")
        return _read_secret(file)
    except OSError as error:
        text = f"cannot read the secret that all nodes share: {error.strerror or error}"
        raise storage_error(f"{text}; or set {SECRET_VARIABLE} on every node", error, file) from None


def _read_secret(file: Path) -> str:
    """Read a secret from a file that another node may still be writing.

    Raises OSError, and LaunchError if the file holds no secret.
    """
    until = time.monotonic() + _VISIBLE_S
    while True:
        text = read_small_file(file, _MAX_FILE_BYTES, "none")
        if text.endswith(b"\n") and len(text) > _SECRET_BYTES:
            return text.decode("ascii", "replace").strip()
        if time.monotonic() > until:
            raise LaunchError(f"{file} holds no secret: remove it, and start all nodes again")
        time.sleep(_POLL_S)
