"""What the operating system says about a file, as one line that names the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from aliquot.errors import StorageError


@contextlib.contextmanager
def reading(path: Path | None) -> Iterator[None]:
    """Raise OSError as UserError: cannot read."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror}", path) from error


@contextlib.contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """Raise OSError as UserError: cannot write."""
    try:
        yield
    except OSError as error:  # disk full, quota, read-only, no permission
        raise StorageError(f"cannot write: {error.strerror}", path) from error
