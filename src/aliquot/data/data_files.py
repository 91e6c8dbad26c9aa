"""Find the files that a path of the `data` section names, and open plain or compressed (.gz, .zst) files."""

from __future__ import annotations

import codecs
import glob
import io
import itertools
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TypeVar

from aliquot.core.errors import DataError, one_line
from aliquot.core.small_files import pointer_message
from aliquot.stores.store import is_url

AnyPath = TypeVar("AnyPath", bound=PurePath)

LONGEST_RECORD = 1 << 26  # bytes or characters of a record, which is in memory as a whole
RECORD_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
IN_DIRECTORIES = {".txt", ".md", ".py", *RECORD_SUFFIXES}  # suffixes that are read in a directory, also compressed
# Names of files that describe a data set, not documents: next to the records, or in a directory above them.
_CARDS = {"readme", "license", "licence", "notice", "citation", "contributing", "changelog", "dataset_info",
          "dataset_infos", "dataset_dict"}  # fmt: skip
CARD = "a README, a license or the like next to records, left out"
HIDDEN = "a hidden file or directory, left out"
NO_FILE = "a device, pipe or socket, left out"
# Parts of the standard library that are no examples of good Python: tests, and tables of characters or help texts.
NOT_OF_STDLIB = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_ALIASES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}
_START_BYTES = 4096  # bytes at the beginning of a file that show its format
_ARCHIVES = {
    "gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "bzip2": b"BZh", "xz": b"\xfd7zXZ", "zip": b"PK\x03\x04",
    "7z": b"7z\xbc\xaf\x27\x1c", "rar": b"Rar!\x1a\x07",
}  # fmt: skip
_OTHERS = {
    "PDF": b"%PDF-", "parquet": b"PAR1", "Arrow": b"ARROW1", "Avro": b"Obj\x01", "PNG": b"\x89PNG",
    "JPEG": b"\xff\xd8\xff", "SQLite": b"SQLite format 3\0", "NumPy": b"\x93NUMPY", "HDF5": b"\x89HDF",
}  # fmt: skip


def find_files(entry: str, key: str, left_out: Counter[str]) -> list[Path]:
    """Return the sorted files that `entry` names: a file, a directory, a glob or `stdlib` (Python's standard library).

    Files that are not read are counted in `left_out`, by reason. Raises DataError for a dangling link, because its data
    are missing. `key`: the key of the configuration that holds `entry`, for error messages.
    """
    if entry == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        modules = (
            file for file in _walk(root, {".py"}, Counter()) if not NOT_OF_STDLIB & set(file.relative_to(root).parts)
        )
        return [file for file in modules if _decodes(file.read_bytes(), final=True)]
    path = Path(entry)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = without_cards(_walk(path, IN_DIRECTORIES, left_out), left_out)
        if not files:
            raise DataError(f"{key}: no {', '.join(sorted(IN_DIRECTORIES))} file in this directory", entry)
        return files
    _refuse_dangling(path)
    if not glob.has_magic(entry):
        raise DataError(f"{key}: no such file or directory", entry)
    # glob.glob is used because Path.glob accepts no absolute pattern.
    files = []
    for match in sorted(map(Path, glob.glob(str(path), recursive=True))):  # noqa: PTH207
        _refuse_dangling(match)
        if match.is_file():
            files.append(match)
        elif not (match.is_dir() and "**" in entry):  # a recursive pattern also matches the files inside
            left_out["a directory that a pattern matches, left out" if match.is_dir() else NO_FILE] += 1
    if not files:
        raise DataError(f"{key}: no file matches", entry)
    return files


def files_written_after(entries: Iterable[str], time_s: float) -> list[Path]:
    """Return the local files that `entries` of the configuration name and that were written after `time_s`."""
    files = [file for entry in entries if not is_url(entry) for file in find_files(entry, "data", Counter())]
    return [file for file in files if file.stat().st_mtime > time_s]


def _refuse_dangling(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"a link to {one_line(path.readlink())}, which is not there: data are missing. Fetch them (git annex get,"
            " dvc pull), or remove the link",
            path,
        )


def without_cards(files: list[AnyPath], left_out: Counter[str]) -> list[AnyPath]:
    """Return `files` without those that describe records next to them; count the latter in `left_out`."""
    cards = {file for file in files if file.name.split(".")[0].lower() in _CARDS}
    described = {
        parent for file in files if file not in cards and suffix_of(file) in RECORD_SUFFIXES for parent in file.parents
    }
    documents = [file for file in files if file not in cards or file.parent not in described]
    left_out.update({CARD: len(files) - len(documents)} if len(files) > len(documents) else {})
    return documents


def _walk(root: Path, suffixes: set[str], left_out: Counter[str]) -> list[Path]:
    """Return the files below `root` with one of `suffixes`, sorted by relative path.

    Links are followed, but no directory is visited twice. Files that are not read are counted in `left_out`, by reason.
    Raises DataError for an unreadable directory, a dangling link, or a dataset that `datasets` has saved.
    """

    def unreadable(error: OSError) -> None:
        raise DataError(f"cannot be read: {error.strerror}", error.filename) from error

    files: list[Path] = []
    visited = {root.resolve()}
    for parent, directories, names in os.walk(root, followlinks=True, onerror=unreadable):
        left_out[HIDDEN] += sum(name.startswith(".") for name in (*directories, *names))
        if "state.json" in names and any(name.endswith(".arrow") for name in names):
            raise DataError("a dataset that save_to_disk has written: give this directory to data.dataset", parent)
        candidates = sorted(name for name in directories if not name.startswith("."))
        directories.clear()
        for name in candidates:
            if (place := Path(parent, name).resolve()) not in visited:
                visited.add(place)
                directories.append(name)
        for file in (Path(parent, name) for name in names if not name.startswith(".")):
            _refuse_dangling(file)
            if not file.is_file():
                left_out[NO_FILE] += 1
            elif suffix_of(file) in suffixes:
                files.append(file)
            else:
                count_unread(file, left_out)
    left_out += Counter()  # removes reasons with a count of 0
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def count_unread(file: PurePath, left_out: Counter[str]) -> None:
    """Count a file with a suffix that is not read in a directory."""
    left_out[f"a file of a kind that is not read ({file.suffix.lower() or 'no suffix'}), left out"] += 1


def _decodes(data: bytes, final: bool) -> bool:
    """Return whether `data` are UTF-8. If they are not `final`, they may end within a character."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final)
    except UnicodeDecodeError:
        return False
    return True


def suffix_of(path: PurePath) -> str:
    """Return the suffix of the content, without compression: `.jsonl` for both `a.jsonl` and `a.jsonl.gz`."""
    suffix = (PurePath(path.stem) if path.suffix.lower() in COMPRESSED else path).suffix.lower()
    return _ALIASES.get(suffix, suffix)


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a file for reading, and yield (stream of the decompressed content, position).

    `position()` returns how many bytes of the file on disk have been read. Reading raises OSError if a compressed file
    is damaged or truncated. Raises UserError for UTF-16 text and for formats that are not text.
    """
    codec = COMPRESSED.get(path.suffix.lower())
    if codec is None:
        with path.open("rb") as file:
            _refuse_no_text(file.peek(_START_BYTES)[:_START_BYTES], path)
            yield file, file.tell
        return
    refuse_pointer(path)
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), "rb"), codec) as stream:
        _refuse_no_text(stream.read(_START_BYTES), path)
    with pyarrow.OSFile(str(path), "rb") as packed:
        stream = pyarrow.CompressedInputStream(packed, codec)
        with io.BufferedReader(stream, 1 << 20) as unpacked:
            yield unpacked, packed.tell


def lines_within_limit(file: BinaryIO | io.TextIOWrapper, path: Path) -> Iterator[Any]:
    """Yield the lines of `file`.

    Raises DataError at a line longer than LONGEST_RECORD, because even a small compressed file may hold a huge line.
    """
    for number in itertools.count(1):
        line = file.readline(LONGEST_RECORD + 1)
        if len(line) > LONGEST_RECORD:
            raise too_long(f"{path}:{number}")
        if not line:
            return
        yield line


def too_long(where: str | Path) -> DataError:
    """Return the error for a record that is longer than LONGEST_RECORD."""
    return DataError(f"a record of more than {LONGEST_RECORD >> 20} MiB: give its text as a file of its own", where)


def refuse_pointer(path: Path) -> None:
    """Raise UserError if the file is a pointer of git-lfs or git-annex instead of the data."""
    with path.open("rb") as file:
        if (message := pointer_message(file.read(64))) is not None:
            raise DataError(message, path)


def _refuse_no_text(start: bytes, path: Path) -> None:
    """Raise DataError if the first bytes of a file (`start`) show UTF-16 or a format that is not text.

    UTF-16 without a byte order mark may be valid UTF-8 in which every second byte is NUL.
    """
    if (message := pointer_message(start) or _name_of_format(start)) is not None:
        raise DataError(message, path)
    halves = {"UTF-16BE": (start[::2], start[1::2]), "UTF-16LE": (start[1::2], start[::2])}  # high and low bytes
    wide = (name for name, (high, low) in halves.items() if low and 0 not in low and high.count(0) * 2 > len(high))
    is_marked = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if coding := "UTF-16" if is_marked else next(wide, None):
        raise DataError(f"{coding} text, not UTF-8: convert it first (iconv -f {coding} -t UTF-8)", path)


def _name_of_format(start: bytes) -> str | None:
    """Return an error message that names the format of a file that begins with `start`; None if it may be text."""
    is_text = _decodes(start, final=False) and b"\0" not in start
    if is_text and not start.startswith(b"%PDF-"):
        return None
    for suffix, codec in COMPRESSED.items():
        if start.startswith(_ARCHIVES[codec]):
            return f"a {codec} archive, not text: let its name end with {suffix}, or unpack it"
    archive = "tar" if start[257:262] == b"ustar" else _named(_ARCHIVES, start)
    if archive is not None:
        return f"a {archive} archive, not text: unpack it first"
    other = _named(_OTHERS, start)
    return other and f"a file of the format {other}, not text: convert it first, or leave it out"


def _named(formats: dict[str, bytes], start: bytes) -> str | None:
    return next((name for name, magic in formats.items() if start.startswith(magic)), None)


def not_text(error: UnicodeDecodeError, where: str, before: int = 0) -> DataError:
    """Return the error for bytes that are not UTF-8. `before`: number of bytes of the file before the decoded bytes."""
    return DataError(f"not UTF-8 text ({error.reason} at byte {before + error.start})", where)
