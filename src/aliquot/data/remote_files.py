"""Find data files under a URL (s3://, gs://, hf://, ...), and copy a file into the data cache before it is read.

The path of a copy depends on the version of the file: an unchanged file is copied once, a changed file again. A copy is
made from one version only, and is verified before it is read.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path, PurePosixPath

from aliquot.core.errors import DataError
from aliquot.data.cache import cached
from aliquot.data.data_files import HIDDEN, IN_DIRECTORIES, count_unread, suffix_of, without_cards
from aliquot.stores.store import FileChangedError, FileVersion, Store, open_store
from aliquot.tensor_io.publish import check_space, is_plain_name

NamedProgress = Callable[[str, int, int], None]  # (name of the work in progress, bytes done, bytes in total)

_RANGE_BYTES, _REQUESTS = 16 << 20, 8  # a copy asks for this many ranges of this size at once
_LONGEST_NAME = 80  # characters of the URL in the name of a copy's directory


@dataclass(frozen=True)
class RemoteFile:
    """A file in an object store, and the path of its copy in the data cache."""

    store: Store
    name: str  # in the store
    url: str
    size_bytes: int
    version: str
    copy: Path

    def fetch(self, report: NamedProgress) -> None:
        """Copy the file into the data cache, unless an intact copy exists. Raises UserError."""
        cached(self.copy.parent, partial(self._copy, report))

    def _copy(self, report: NamedProgress, directory: Path) -> None:
        check_space(directory, self.size_bytes)
        (directory / self.copy.name).touch()
        starts = range(0, self.size_bytes, _RANGE_BYTES)
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for done_bytes in pool.map(partial(self._copy_range, directory / self.copy.name), starts):
                report(f"copying {self.url}", done_bytes, self.size_bytes)

    def _copy_range(self, target: Path, start: int) -> int:
        stop = min(start + _RANGE_BYTES, self.size_bytes)
        try:
            data = self.store.read(self.name, start, stop, FileVersion(self.size_bytes, self.version))
            if len(data) != stop - start:
                raise FileChangedError
        except FileNotFoundError:
            raise DataError("this file of the data is no longer there: start again", self.url) from None
        except FileChangedError:
            raise DataError("has changed since the start of this run: start again", self.url) from None
        with target.open("r+b") as file:
            file.seek(start)
            file.write(data)
        return stop


def find_remote(url: str, key: str, left_out: Counter[str], cache: Path) -> list[RemoteFile]:
    """Return the sorted files that `url` names: a file, a directory or a glob, as `find_files` does for local paths.

    Files that are not read are counted in `left_out`, by reason. `cache`: the directory for copies. `key`: the key of
    the configuration that holds `url`, for error messages. Raises UserError.
    """
    scheme, _, path = url.partition("://")
    parts = path.strip("/").split("/")
    plain = list(takewhile(lambda part: not glob.has_magic(part), parts))
    is_pattern = len(plain) < len(parts)
    # A store begins above the file or directory, because its own name is the argument of `Store.find`.
    above = plain if is_pattern or len(plain) == 1 else plain[:-1]
    name = "" if above == plain else plain[-1]
    root = f"{scheme}://{'/' * path.startswith('/')}{'/'.join(above)}"
    store = open_store(root)
    versions = store.find(name)
    if is_pattern:
        names = _matching(versions, "/".join(parts[len(above) :]), key, url)
    else:
        names = [name] if name in versions else _in_directory(versions, name, left_out)
    if not names:
        reason = "no file matches" if is_pattern else "no such file, and no directory with data"
        raise DataError(f"{key}: {reason}", url)
    return [
        RemoteFile(
            store, found, f"{root}/{found}", *versions[found], _copy_of(f"{root}/{found}", versions[found], cache)
        )
        for found in names
    ]


def _matching(names: Iterable[str], pattern: str, key: str, url: str) -> list[str]:
    from fsspec.utils import glob_translate

    try:
        matches = re.compile(glob_translate(pattern)).match
    except (ValueError, re.error) as error:
        raise DataError(f"{key}: not a pattern of files ({error})", url) from None
    return sorted(filter(matches, names))


def _in_directory(names: Iterable[str], directory: str, left_out: Counter[str]) -> list[str]:
    """Return those files of a directory that are read, sorted by relative path; count the others in `left_out`."""
    files = []
    for path in map(PurePosixPath, sorted(names)):
        if any(part.startswith(".") for part in path.relative_to(directory).parts):
            left_out[HIDDEN] += 1
        elif suffix_of(path) in IN_DIRECTORIES:
            files.append(path)
        else:
            count_unread(path, left_out)
    return [str(path) for path in without_cards(files, left_out)]


def _copy_of(url: str, version: tuple[int, str], cache: Path) -> Path:
    directory, _, name = url.rpartition("/")
    if not is_plain_name(name):
        raise DataError("this name cannot be the name of a local copy: rename the file", url)
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", directory)[-_LONGEST_NAME:]
    digest = hashlib.sha256(f"{url}\0{version}".encode()).hexdigest()
    return cache / "remote" / f"{readable}-{digest[:16]}" / name
