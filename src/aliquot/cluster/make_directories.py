"""A program that pods run: create a run's directories on a shared volume as root, or wait until they are writable.

    python -m aliquot.cluster.make_directories own UID VOLUME DIRECTORY...
    python -m aliquot.cluster.make_directories await SECONDS DIRECTORY...

`own` creates the directories and gives them to the user UID, because a new file system belongs to root, but the trainer
does not run as root. `await` waits until the current user may write to the directories.

Other pods can write to the volume, too. Therefore `own` follows no symbolic link on the volume: with a planted link,
root would give the target of the link to the trainer's user.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from aliquot.core.errors import StorageError, writing

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_POLL_S = 1.0


def own_directory(directory: Path, volume: Path, user: int) -> None:
    """Create `directory` below `volume`, and change its owner from root to `user`.

    Raises StorageError if a part of the path is a link or a file, or if the directory belongs to another user.
    """
    if not directory.is_relative_to(volume) or ".." in directory.parts:
        raise StorageError(f"not a directory of the volume {volume}: give a path below it without `..`", directory)
    parent = os.open(volume, _DIRECTORY)
    for name in directory.relative_to(volume).parts:
        try:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=parent)
            child = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        except NotADirectoryError:
            raise StorageError(f"{name!r} is a link or a file: remove it, or choose another path", directory) from None
        finally:
            os.close(parent)
        parent = child
    try:
        owner = os.fstat(parent).st_uid
        if owner == 0:
            os.fchown(parent, user, user)
        elif owner != user:
            raise StorageError(
                f"belongs to user {owner}, and the trainer is user {user}: change its owner, or choose another path",
                directory,
            )
    finally:
        os.close(parent)


def await_directories(directories: Sequence[Path], timeout_s: float) -> None:
    """Wait until the current user may write to all `directories`. Raises StorageError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while missing := [directory for directory in directories if not os.access(directory, os.W_OK | os.X_OK)]:
        if time.monotonic() >= deadline:
            raise StorageError(
                f"user {os.getuid()} cannot write here after {timeout_s:g} s: the Job that makes the directory has not"
                " finished. See `kubectl get jobs`, or make it by hand",
                missing[0],
            )
        time.sleep(_POLL_S)


def main(mode: str, number: str, *paths: str) -> None:
    """Run the program; `number` is a user id for `own`, or seconds for `await`. Raises StorageError."""
    directories = [Path(path) for path in paths]
    if mode == "await":
        await_directories(directories, float(number))
        return
    volume, *targets = directories
    for path in targets:
        with writing(path):
            own_directory(path, volume, int(number))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except StorageError as error:
        sys.exit(f"aliquot: {error.line}")
