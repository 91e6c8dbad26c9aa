"""Which files a path of the `data` section names, and what else lies there."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections import Counter
from pathlib import Path

from aliquot.core.errors import DataError, one_line
from aliquot.data.documents import RECORDS
from aliquot.data.opened import suffix_of

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
        parent for file in files if file not in cards and suffix_of(file) in RECORDS for parent in file.parents
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
