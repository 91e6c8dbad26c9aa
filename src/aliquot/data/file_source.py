"""Read the documents of files: local files, and files in object stores, which are copied into the data cache first."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from aliquot.config.data_section import RecordsSection
from aliquot.core.errors import ConfigError, DataError
from aliquot.data.cache import digests, sampled_digest
from aliquot.data.data_files import RECORD_SUFFIXES, find_files, suffix_of
from aliquot.data.documents import UNKNOWN_FIELD, Document, Unit, left_out, refuse_bad_alone, text_documents
from aliquot.data.formats import unknown_field
from aliquot.data.record_files import binary_documents, csv_documents, json_documents, jsonl_documents
from aliquot.data.remote_files import NamedProgress, RemoteFile, find_remote
from aliquot.data.table_files import open_arrow, open_parquet
from aliquot.stores.store import is_url

_NOT_READ = {".tsv", ".feather", ".orc", ".avro", ".xls", ".xlsx"}
_DOCUMENTS_BY_SUFFIX: dict[str, Callable[[Path, RecordsSection], Iterator[Document]]] = {
    ".jsonl": jsonl_documents, ".json": json_documents, ".csv": csv_documents,
    ".parquet": partial(binary_documents, "parquet", open_parquet),
    ".arrow": partial(binary_documents, "Arrow", open_arrow),
}  # fmt: skip


def no_report(what: str, done_bytes: int, total_bytes: int) -> None:
    """Show no progress."""


class Place(NamedTuple):
    """The place of a document, or of a part of a long one, in a `FileSource`."""

    file: int  # index of the file
    number: int  # within the file, from 1


BEGINNING = Place(0, 0)


@dataclass(frozen=True)
class FileSource:
    """The documents of files: of local files, and of copies of files in object stores."""

    files: tuple[Path, ...]
    units: tuple[Unit, ...]  # for each file: whether a document is the file, a line, a block or a field
    section: RecordsSection
    label: str
    total_bytes: int
    cache: Path  # directory of stored digests
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason -> number of files that are not read
    remote: Mapping[Path, RemoteFile] = field(default_factory=dict)  # copy -> file in an object store
    report: NamedProgress = no_report  # called while files are copied
    names_own_fields: bool = True  # False: a record of another source may have the fields that the section names

    @classmethod
    def find(cls, section: RecordsSection, cache: Path, key: str, report: NamedProgress = no_report) -> FileSource:
        """Find the files at the paths and URLs of `section`. Raises UserError if a file is named twice.

        `key`: the key of the paths in the configuration, for error messages.
        """
        left_out: Counter[str] = Counter()
        files: list[Path] = []
        remote: dict[Path, RemoteFile] = {}
        for entry in section.paths:
            copies = {file.copy: file for file in find_remote(entry, key, left_out, cache)} if is_url(entry) else {}
            files += copies or find_files(entry, key, left_out)
            remote |= copies
        times = Counter(file.absolute() for file in files)
        twice = next((file for file in files if times[file.absolute()] > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{key} names {twice} {times[twice.absolute()]} times: name the file once; to train on it more"
                " often, give it a weight in data.sources"
            )
        return cls(
            files=tuple(files),
            units=tuple(_unit(file, section.document) for file in files),
            section=section,
            label=f"{key} {', '.join(section.paths)}",
            total_bytes=sum(remote[file].size_bytes if file in remote else file.stat().st_size for file in files),
            cache=cache,
            left_out=left_out,
            remote=remote,
            report=report,
        )

    @cached_property
    def digest(self) -> str:
        for file in self.remote.values():
            file.fetch(self.report)
        return self._digest_of(lambda: digests(self.files, self.cache))

    @property
    def stream_digest(self) -> str:
        """Hash of sizes, beginnings and ends of the files; of files in object stores, hash of sizes and versions."""

        def content(file: Path) -> str:
            remote = self.remote.get(file)
            return sampled_digest(file) if remote is None else f"{remote.size_bytes} {remote.version}"

        return self._digest_of(lambda: list(map(content, self.files)))

    def _digest_of(self, read_contents: Callable[[], Sequence[str]]) -> str:
        total, section = hashlib.sha256(), self.section
        try:
            contents = read_contents()
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror or error})", error.filename or self.label) from error
        compared = (name for name in (section.chosen, section.rejected, section.label) if name is not None)
        names = (section.text_field, section.messages, section.prompt, section.completion)
        fields = json.dumps([*names, *compared, *section.unused_fields])
        for path, unit, content in zip(self.files, self.units, contents, strict=True):
            reader, named = (suffix_of(path), fields) if unit == "field" else ("text", "")
            packed = path.suffix if suffix_of(path) != path.suffix else ""
            total.update(f"{reader}{packed}\0{unit}\0{named}\0{content}\0".encode())
        return total.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield all documents.

        Raises UserError if no record can be read, in all files or in one file with several records, and at the end if
        no record has one of data.unused_fields, because single records may lack a field.
        """
        documents = chain(self.left_out_files(), (document for _, document in self.documents_after()))
        for document in refuse_bad_alone(documents):
            if document.reason == UNKNOWN_FIELD:
                raise DataError(document.where)
            yield document

    def left_out_files(self) -> Iterator[Document]:
        """Yield a blank document with a reason for each file that is not read."""
        for reason, count in self.left_out.items():
            yield from [Document("", "text", 0, reason=reason)] * count

    def documents_after(self, place: Place = BEGINNING) -> Iterator[tuple[Place, Document]]:
        """Yield the documents after `place`, each with its own place; of earlier files, nothing is read.

        After all documents, yield a blank one with the reason UNKNOWN_FIELD if no record has one of data.unused_fields.
        """
        unknown = set(self.section.unused_fields) if self.names_own_fields and place == BEGINNING else set()
        fields: Collection[str] = ()
        before_bytes = sum(map(self._size_bytes, self.files[: place.file]))
        for index in range(place.file, len(self.files)):
            for number, document in enumerate(self._documents_of(index), 1):
                unknown.difference_update(document.fields)
                fields = document.fields or fields
                if index > place.file or number > place.number:
                    yield Place(index, number), document._replace(done_bytes=before_bytes + document.done_bytes)
            before_bytes += self._size_bytes(self.files[index])
        if fields and (error := unknown_field(unknown, fields, self.label)):
            yield Place(len(self.files), 0), left_out(error, before_bytes)

    def _documents_of(self, index: int) -> Iterator[Document]:
        file, unit = self.files[index], self.units[index]
        if file in self.remote:
            self.remote[file].fetch(self.report)
        try:
            documents = record_documents(file, self.section) if unit == "field" else text_documents(file, unit)
            yield from refuse_bad_alone(documents, at_least=2)
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror or error})", file) from error

    def _size_bytes(self, file: Path) -> int:
        return self.remote[file].size_bytes if file in self.remote else file.stat().st_size


def record_documents(path: Path, section: RecordsSection) -> Iterator[Document]:
    """Yield one document for each record, even a blank one, of a file of records (RECORD_SUFFIXES).

    A record that cannot be read becomes a blank document with a reason. Raises UserError for a malformed or truncated
    file, and for a record of another format than the first one.
    """
    return _DOCUMENTS_BY_SUFFIX[suffix_of(path)](path, section)


def _unit(file: Path, unit: Unit | None) -> Unit:
    records = suffix_of(file) in RECORD_SUFFIXES
    if suffix_of(file) in _NOT_READ:
        raise DataError(
            f"tables of this format are not read: convert the file into one of {', '.join(RECORD_SUFFIXES)}", file
        )
    if unit is None:
        return "field" if records else "file"
    if records and unit != "field":
        raise DataError(f"data.document: {unit} is for plain text; a record's document is its `field`", file)
    if not records and unit == "field":
        raise DataError(
            f"data.document: field is for records ({', '.join(RECORD_SUFFIXES)}); plain text has file, line or block",
            file,
        )
    return unit
