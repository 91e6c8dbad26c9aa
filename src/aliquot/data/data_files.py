"""Find the files that a path of the `data` section names, and open them: plain, or compressed as the suffix says."""

from __future__ import annotations

import codecs
import glob
import io
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from aliquot.core.errors import DataError, one_line
from aliquot.core.small_files import LFS_POINTER, is_lfs_pointer

RECORD_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
IN_DIRECTORIES = {".txt", ".md", ".py", ".jsonl", ".json", ".csv", ".parquet"}  # and compressed ones
# In a directory, at or above files of records: what describes them.
_CARDS = {"readme", "license", "licence", "notice", "citation", "contributing", "changelog", "dataset_info",
          "dataset_infos", "dataset_dict"}  # fmt: skip
CARD = "a README, a license or the like beside records, left out"
HIDDEN = "a hidden file or directory, left out"
NO_FILE = "a device, pipe or socket, left out"
DIRECTORY = "a directory that a pattern matches, left out"
# Nobody reads tests and tables (of characters, of help texts) to learn how Python is written.
NOT_OF_STDLIB = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_ALIASES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}
_LOOKED_AT = 4096  # bytes, for what says that it is UTF-16
_ARCHIVES = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar",
}  # fmt: skip
_OTHERS = {
    b"%PDF-": "PDF", b"PAR1": "parquet", b"ARROW1": "Arrow", b"Obj\x01": "Avro", b"\x89PNG": "PNG",
    b"\xff\xd8\xff": "JPEG", b"SQLite format 3\0": "SQLite", b"\x93NUMPY": "NumPy", b"\x89HDF": "HDF5",
}  # fmt: skip


def find_files(entry: str, key: str, left_out: Counter[str]) -> list[Path]:
    """The files of one entry of a path: a file, a directory, a glob or `stdlib`; sorted within the entry.

    `left_out` counts by reason what else is there. Raises DataError for a link to what is not there: data are missing.
    """
    if entry == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        modules = (
            file for file in _walk(root, {".py"}, Counter()) if not NOT_OF_STDLIB & set(file.relative_to(root).parts)
        )
        return [file for file in modules if _is_utf8(file)]
    path = Path(entry)
    if path.is_file():
        return [path]
    if path.is_dir():
        walked = _walk(path, IN_DIRECTORIES, left_out)
        files = _without_cards(walked)
        if not files:
            raise DataError(f"{key}: no {', '.join(sorted(IN_DIRECTORIES))} file in this directory", entry)
        left_out.update({CARD: len(walked) - len(files)} if len(walked) > len(files) else {})
        return files
    _refuse_dangling(path)
    if not glob.has_magic(entry):
        raise DataError(f"{key}: no such file or directory", entry)
    # Path.glob takes no absolute pattern.
    files = []
    for match in sorted(map(Path, glob.glob(str(path), recursive=True))):  # noqa: PTH207
        _refuse_dangling(match)
        if match.is_file():
            files.append(match)
        elif not (match.is_dir() and "**" in entry):  # of which what is in it matches, too
            left_out[DIRECTORY if match.is_dir() else NO_FILE] += 1
    if not files:
        raise DataError(f"{key}: no file matches", entry)
    return files


def _refuse_dangling(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"a link to {one_line(path.readlink())}, which is not there: data are missing. Fetch them (git annex get,"
            " dvc pull), or remove the link",
            path,
        )


def _without_cards(files: list[Path]) -> list[Path]:
    cards = {file for file in files if file.name.split(".")[0].lower() in _CARDS}
    described = {
        parent for file in files if file not in cards and suffix_of(file) in RECORD_SUFFIXES for parent in file.parents
    }
    return [file for file in files if file not in cards or file.parent not in described]


def _walk(root: Path, suffixes: set[str], left_out: Counter[str]) -> list[Path]:
    """Files below `root` with one of `suffixes`, sorted by their relative names; links are followed, each place once.

    `left_out` counts the others by reason. Raises DataError for a directory that cannot be read, for a link to what is
    not there, and for a dataset that `datasets` has saved.
    """

    def unreadable(error: OSError) -> None:
        raise DataError(f"cannot be read: {error.strerror}", error.filename) from error

    found: list[Path] = []
    walked = {root.resolve()}
    for parent, directories, names in os.walk(root, followlinks=True, onerror=unreadable):
        left_out[HIDDEN] += sum(name.startswith(".") for name in (*directories, *names))
        if "state.json" in names and any(name.endswith(".arrow") for name in names):
            raise DataError("a dataset that save_to_disk has written: give this directory to data.dataset", parent)
        candidates = sorted(name for name in directories if not name.startswith("."))
        directories.clear()
        for name in candidates:
            if (place := Path(parent, name).resolve()) not in walked:
                walked.add(place)
                directories.append(name)
        for file in (Path(parent, name) for name in names if not name.startswith(".")):
            _refuse_dangling(file)
            if not file.is_file():
                left_out[NO_FILE] += 1
            elif suffix_of(file) in suffixes:
                found.append(file)
            else:
                left_out[f"a file of a kind that is not read ({file.suffix.lower() or 'no suffix'}), left out"] += 1
    for reason in [reason for reason, count in left_out.items() if not count]:
        del left_out[reason]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _is_utf8(file: Path) -> bool:
    try:
        file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def suffix_of(path: Path) -> str:
    """What is in a file, by its name: `.jsonl` of both `a.jsonl` and `a.jsonl.gz`."""
    suffix = (Path(path.stem) if path.suffix.lower() in _CODECS else path).suffix.lower()
    return _ALIASES.get(suffix, suffix)


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """(its content, unpacked as it is read; how many bytes of the file have been read). Raises OSError as it is read
    where an archive is damaged or cut short, UserError where it is UTF-16."""
    codec = _CODECS.get(path.suffix.lower())
    if codec is None:
        with path.open("rb") as file:
            _refuse_no_text(file.peek(_LOOKED_AT)[:_LOOKED_AT], path)
            yield file, file.tell
        return
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), "rb"), codec) as stream:
        _refuse_no_text(stream.read(_LOOKED_AT), path)
    with pyarrow.OSFile(str(path), "rb") as packed:
        stream = pyarrow.CompressedInputStream(packed, codec)
        with io.BufferedReader(stream, 1 << 20) as unpacked:
            yield unpacked, packed.tell


def refuse_pointer(path: Path) -> None:
    """Raises UserError for what git-lfs has left in the place of a file."""
    with path.open("rb") as file:
        if is_lfs_pointer(file.read(64)):
            raise DataError(LFS_POINTER, path)


def _refuse_no_text(start: bytes, path: Path) -> None:
    """By a file's `start`: UTF-16 without a mark may pass for UTF-8, half of it NULs, and so may other formats."""
    if is_lfs_pointer(start):
        raise DataError(LFS_POINTER, path)
    if (other := _other_format(start)) is not None:
        raise DataError(other, path)
    high, low = start[::2], start[1::2]
    coding = None
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        coding = "UTF-16"
    elif low and high.count(0) * 2 > len(high) and not low.count(0):
        coding = "UTF-16BE"
    elif low and low.count(0) * 2 > len(low) and not high.count(0):
        coding = "UTF-16LE"
    if coding is not None:
        raise DataError(f"{coding} text, not UTF-8: convert it first (iconv -f {coding} -t UTF-8)", path)


def _other_format(start: bytes) -> str | None:
    """What to say of a file that begins so; None: it may be text, also one that begins with the letters of a format."""
    if not start.startswith(b"%PDF-") and not _is_binary(start):
        return None
    packed = next((name for magic, name in _ARCHIVES.items() if start.startswith(magic)), None)
    if packed is None and start[257:262] == b"ustar":
        packed = "tar"
    if packed in _CODECS.values():
        suffix = next(suffix for suffix, name in _CODECS.items() if name == packed)
        return f"a {packed} archive, not text: let its name end with {suffix}, or unpack it"
    if packed is not None:
        return f"a {packed} archive, not text: unpack it first"
    other = next((name for magic, name in _OTHERS.items() if start.startswith(magic)), None)
    return None if other is None else f"a file of the format {other}, not text: convert it first, or leave it out"


def _is_binary(start: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # its end may be within a character
    except UnicodeDecodeError:
        return True
    return b"\0" in start


def not_text(error: UnicodeDecodeError, where: str, before: int = 0) -> DataError:
    """What to say of bytes that are not UTF-8; `before` bytes came before them."""
    return DataError(f"not UTF-8 text ({error.reason} at byte {before + error.start})", where)
