"""Whether two directories hold the same weights, without reading all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from aliquot.core.errors import UserError
from aliquot.tensor_io.header import read_header

_SAMPLE_BYTES = 4096
_EVERY_BYTES = 4 << 20  # of a file: what a copy that was broken off has left out is larger
_OTHER_FORMS = "consolidated*.safetensors"  # the same weights again, for other programs


def fingerprint(directory: Path) -> str:
    """Of its weights: a hash of sizes, of the files' headers, of the beginning of each tensor and of a sample of each
    4 MiB, a thousandth of them. Raises OSError."""
    total = hashlib.sha256()
    others = set(directory.glob(_OTHER_FORMS))
    for path in sorted(set(directory.glob("*.safetensors")) - others):
        total.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            for at in sorted({*range(0, path.stat().st_size, _EVERY_BYTES), *_tensors(path)}):
                file.seek(at)
                total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()[:16]


def _tensors(path: Path) -> Iterator[int]:
    """Where each begins, and pieces of what says so; nothing of a file that cannot be loaded, as whoever does says."""
    with suppress(UserError):
        header = read_header(path)
        yield from range(0, header.header_bytes, _SAMPLE_BYTES)
        yield from (entry.offset for entry in header.entries.values())
