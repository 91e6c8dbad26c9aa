"""The manifest of a checkpoint, which lists the size and the block checksums of every file.

A checkpoint directory is complete if and only if it has a valid manifest, because the manifest is written last.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aliquot.core.decode import has_checksum, parse_json, read_json, with_checksum
from aliquot.core.errors import DamagedCheckpoint, ResumeError, UserError, reading
from aliquot.core.small_files import open_regular, read_small_file
from aliquot.tensor_io.checksums import BLOCK_BYTES, BlockShares
from aliquot.tensor_io.publish import is_plain_name

MANIFEST = "manifest.json"
STATE = "state.json"  # holds the training progress and the settings that a resume compares
# The fields of a state that are used when the state is read, with their types. Version 0.1.0 has no sizes and hub_ids.
_STATE_FIELDS: dict[str, Any] = {
    "step": int, "tokens": int, "position.epoch": int, "position.index": int, "ends": list, "determinants": dict,
    "evaluations": dict, "evaluations.best_step": int | None, "evaluations.best_value": float | int | None,
    "model.config": dict, "model.transformers": str, "config.data": dict, "config.model.dtype": str,
    "config.train.precision": str, "sizes": dict | None, "hub_ids": list | None,
}  # fmt: skip

# Errors of a node that cannot reach the files. They do not mean that the checkpoint is damaged.
_UNREACHABLE = {
    errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
}  # fmt: skip

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileRecord(BaseModel):
    """The size of a file and the crc32 of each of its blocks; the last block may be short."""

    model_config = _STRICT
    bytes: Annotated[int, Field(ge=0, lt=2**63)]
    crc32: list[Annotated[int, Field(ge=0, lt=2**32)]]


class Manifest(BaseModel):
    """The records of all files of a checkpoint except the manifest."""

    model_config = _STRICT
    format: Literal["aliquot-checkpoint"] = "aliquot-checkpoint"
    version: Literal[1] = 1
    block_bytes: Literal[16777216] = BLOCK_BYTES  # type: ignore[assignment]
    files: dict[str, FileRecord]
    config_files: list[str]  # the files of a Hugging Face model directory other than weights, such as config.json

    def sizes(self, paths: Iterable[Path]) -> dict[str, int]:
        """Return the size in bytes of each file, by name. Raises DamagedCheckpoint if a file has no record."""
        return {path.name: self.record(path.name).bytes for path in paths}

    def record(self, name: str) -> FileRecord:
        """Return the record of file `name`. Raises DamagedCheckpoint if there is no record."""
        if name not in self.files:
            raise DamagedCheckpoint(f"{name[:200]!r} is not in the manifest")
        return self.files[name]


def checksum(data: bytes) -> FileRecord:
    """Compute the size and checksums of a file with the content `data`."""
    blocks = range(0, len(data), BLOCK_BYTES)
    return FileRecord(bytes=len(data), crc32=[zlib.crc32(data[start : start + BLOCK_BYTES]) for start in blocks])


def file_record(path: Path) -> FileRecord:
    """Compute the size and checksums of a file, in several threads. Raises OSError."""
    return FileRecord(bytes=path.stat().st_size, crc32=_checksums_of_blocks(path))


def manifest_bytes(files: Mapping[str, FileRecord], config_files: Sequence[str]) -> bytes:
    """Encode a manifest as JSON, with a checksum of its fields."""
    fields = Manifest(files=dict(files), config_files=list(config_files)).model_dump()
    return json.dumps(with_checksum(fields), indent=1).encode()


@contextmanager
def reading_checkpoint(path: Path | None = None) -> Iterator[None]:
    """Turn errors of reading files into DamagedCheckpoint; raise ResumeError if the node cannot reach the files.

    A run would otherwise go back to an older checkpoint, and replace a good one. `path`: as for `reading`.
    """
    try:
        with reading(path):
            yield
    except (DamagedCheckpoint, ResumeError):
        raise
    except UserError as error:
        if _errno(error) in _UNREACHABLE:
            raise ResumeError(
                f"{platform.node()} cannot read this checkpoint, which need not be damaged: {error}; repair the access"
                " and start again"
            ) from error
        raise DamagedCheckpoint(str(error)) from error


def _errno(error: BaseException | None) -> int | None:
    """Return the errno of the operating system error that caused `error`, or None."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return None if error is None else error.errno


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a complete checkpoint and check the sizes of its files.

    Raises DamagedCheckpoint, and ResumeError as `reading_checkpoint` does.
    """
    path = directory / MANIFEST
    with reading_checkpoint(path):
        if not path.exists():
            raise DamagedCheckpoint(f"not a complete checkpoint: it has no {MANIFEST}", directory)
        manifest = parse_manifest(read_small_file(path), path)
    for path, record in ((directory / name, record) for name, record in manifest.files.items()):
        with reading_checkpoint(path):
            size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            reason = "missing from the checkpoint" if size is None else f"{size} bytes instead of {record.bytes}"
            raise DamagedCheckpoint(reason, path)
    return manifest


def parse_manifest(data: bytes, path: str | Path) -> Manifest:
    """Parse and check a manifest. Raises DamagedCheckpoint. `path`: the source of `data`, for error messages."""
    try:
        fields = parse_json(data, path)
        if not has_checksum(fields):
            raise DamagedCheckpoint("its own checksum does not fit", path)
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ascii(".".join(map(str, first["loc"])))  # a name may contain any character, even a newline
        raise DamagedCheckpoint(f"{where[1:-1]}: {first['msg']}"[:200], path) from error
    except UserError as error:
        raise DamagedCheckpoint(str(error)) from error
    for name, record in manifest.files.items():
        if not is_plain_name(name) or len(record.crc32) != -(-record.bytes // BLOCK_BYTES):
            raise DamagedCheckpoint(f"the entry {name[:200]!r} is malformed", path)
    if not set(manifest.config_files) <= set(manifest.files):
        raise DamagedCheckpoint("config_files that are not among its files", path)
    return manifest


def read_state(directory: Path) -> dict[str, Any]:
    """Verify and return the state of a checkpoint. Raises DamagedCheckpoint, also for a state of another shape."""
    verify_file(directory, read_manifest(directory), STATE)
    state = read_json(directory / STATE)
    for path, kind in _STATE_FIELDS.items():
        value: Any = state
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            raise DamagedCheckpoint(f"{path} has a value that no run writes, {repr(value)[:100]}", directory / STATE)
    return state


def verify(directory: Path) -> Manifest:
    """Verify every byte of a checkpoint. Raises DamagedCheckpoint that names the file and its first damaged block."""
    manifest = read_manifest(directory)
    for name in manifest.files:
        verify_file(directory, manifest, name)
    return manifest


def verify_descriptions(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Verify the headers of safetensors files and the whole content of other files, before they are parsed.

    A damaged header may still be valid, and describe another model. Raises DamagedCheckpoint.
    """
    for name in names:
        verify_file(directory, manifest, name, only_header=name.endswith(".safetensors"))


def verify_file(directory: Path, manifest: Manifest, name: str, only_header: bool = False) -> None:
    """Verify a file of a checkpoint, or only the blocks with its safetensors header. Raises DamagedCheckpoint."""
    with reading_checkpoint(directory / name):
        blocks = _checksums_of_blocks(directory / name, only_header)
    if only_header:
        blocks += manifest.record(name).crc32[len(blocks) :]
    check_blocks(directory, manifest, {name: blocks})


def _checksums_of_blocks(path: Path, only_header: bool = False) -> list[int]:
    """Compute the crc32 of each block, or only of the blocks with the header of a safetensors file. Raises OSError."""
    with open_regular(path) as file, ThreadPoolExecutor() as pool:
        size, start = os.fstat(file.fileno()).st_size, os.pread(file.fileno(), 8, 0)
        starts = range(0, min(size, 8 + int.from_bytes(start, "little")) if only_header else size, BLOCK_BYTES)
        # Reading and crc32 release the GIL.
        return list(pool.map(lambda start: zlib.crc32(os.pread(file.fileno(), BLOCK_BYTES, start)), starts))


def check_read(directory: Path, manifest: Manifest, header_bytes: Mapping[Path, int], shares: BlockShares) -> None:
    """Compare the checksums of safetensors files that all ranks have read with the manifest. Raises DamagedCheckpoint.

    `header_bytes`: the header length of each file. `shares`: the checksums of the pieces that all ranks have read.
    """
    check_blocks(directory, manifest, shares.with_headers(header_bytes).blocks())


def check_blocks(directory: Path, manifest: Manifest, blocks: Mapping[str, list[int]]) -> None:
    """Compare the crc32 of all blocks of the given files with the manifest. Raises DamagedCheckpoint.

    `blocks`: file name -> crc32 of each block.
    """
    for name, actual in blocks.items():
        recorded = manifest.record(name).crc32
        if actual != recorded:
            pairs = enumerate(zip(actual, recorded, strict=False))
            damaged = next((i for i, (crc, saved) in pairs if crc != saved), min(len(actual), len(recorded)))
            raise DamagedCheckpoint(
                f"damaged: the block at byte {damaged * BLOCK_BYTES} differs from the saved block", directory / name
            )
