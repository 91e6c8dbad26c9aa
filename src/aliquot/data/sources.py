"""From the `data` section to an ordered stream of documents: local files, or a dataset of Hugging Face's `datasets`;
each whole, or the part of it that is held out for evaluation, or the rest.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from aliquot.config.cache_root import cache_root
from aliquot.config.schema import DataSection
from aliquot.data.digests import digests
from aliquot.data.documents import (
    Document,
    Unit,
    check_field,
    jsonl_documents,
    parquet_documents,
    text_documents,
    value_text,
)
from aliquot.errors import ConfigError, DataError

RECORDS = {".jsonl": jsonl_documents, ".json": jsonl_documents, ".parquet": parquet_documents}
IN_DIRECTORIES = {".txt", ".md", ".py", ".jsonl", ".parquet"}
# Nobody reads tests and tables (of characters, of help texts) to learn how Python is written.
NOT_OF_STDLIB = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip


class Source(Protocol):
    @property
    def label(self) -> str:
        """What to call it in a message."""
        ...

    @property
    def total_bytes(self) -> int:
        """What `Document.done_bytes` counts up to."""
        ...

    @property
    def digest(self) -> str:
        """Hash of the content and of what a document is; neither names nor times nor places are part of it."""
        ...

    def documents(self) -> Iterator[Document]:
        """All documents that are not blank, always in the same order."""
        ...


def train_source(section: DataSection) -> Source:
    """Raises UserError where there is nothing to read, or `data.document` does not fit what is there."""
    if section.path is not None:
        return FileSource.find(section, section.path, "data.path")
    return HubSource.load(section, section.split)


def eval_source(section: DataSection) -> Source | None:
    """The source of `data.eval_path` or `data.eval_split`; None where neither is set."""
    if section.eval_path is not None and section.eval_split is not None:
        raise ConfigError("give only one of data.eval_path and data.eval_split")
    if section.eval_path is not None:
        return FileSource.find(section, section.eval_path, "data.eval_path")
    if section.eval_split is None:
        return None
    if section.dataset is None:
        raise ConfigError("data.eval_split is a split of data.dataset; with data.path give data.eval_path")
    return HubSource.load(section, section.eval_split)


@dataclass(frozen=True)
class FileSource:
    files: tuple[Path, ...]
    units: tuple[Unit, ...]  # one a file
    text_field: str
    label: str
    total_bytes: int
    cache: Path  # where digests are kept

    @classmethod
    def find(cls, section: DataSection, path: str | list[str], key: str) -> FileSource:
        """The files at `path`, which `key` of the section names."""
        entries = [path] if isinstance(path, str) else path
        files = list(dict.fromkeys(file for entry in entries for file in _find(entry, key)))
        if not files:
            raise ConfigError(f"{key} is an empty list")
        return cls(
            files=tuple(files),
            units=tuple(_unit(file, section.document) for file in files),
            text_field=section.text_field,
            label=f"{key} {', '.join(entries)}",
            total_bytes=sum(file.stat().st_size for file in files),
            cache=cache_root(section.cache_directory),
        )

    @cached_property
    def digest(self) -> str:
        total = hashlib.sha256()
        try:
            contents = digests(self.files, self.cache)
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror or error})", error.filename or self.label) from error
        for file, unit, content in zip(self.files, self.units, contents, strict=True):
            reader = file.suffix if file.suffix in RECORDS else "text"
            field = self.text_field if unit == "field" else ""
            total.update(f"{reader}\0{unit}\0{field}\0{content}\0".encode())
        return total.hexdigest()

    def documents(self) -> Iterator[Document]:
        before_bytes = 0
        for file, unit in zip(self.files, self.units, strict=True):
            try:
                if unit == "field":
                    documents = RECORDS[file.suffix](file, self.text_field)
                else:
                    documents = text_documents(file, unit)
                for document in documents:
                    if document.text and not document.text.isspace():
                        yield document._replace(done_bytes=before_bytes + document.done_bytes)
            except OSError as error:
                raise DataError(f"cannot be read ({error.strerror or error})", file) from error
            before_bytes += file.stat().st_size


def _find(entry: str, key: str) -> list[Path]:
    """The files of one entry of a path: a file, a directory, a glob or `stdlib`; sorted within the entry."""
    if entry == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        modules = (file for file in _walk(root, {".py"}) if not NOT_OF_STDLIB & set(file.relative_to(root).parts))
        return [file for file in modules if _is_utf8(file)]
    path = Path(entry).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = _walk(path, IN_DIRECTORIES)
        if not files:
            raise DataError(f"{key}: no {', '.join(sorted(IN_DIRECTORIES))} file in this directory", entry)
        return files
    if not glob.has_magic(entry):
        raise DataError(f"{key}: no such file or directory", entry)
    # Path.glob takes no absolute pattern.
    files = sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if match.is_file())  # noqa: PTH207
    if not files:
        raise DataError(f"{key}: no file matches", entry)
    return files


def _walk(root: Path, suffixes: set[str]) -> list[Path]:
    """Files below `root`, hidden ones left out, sorted by their relative names."""
    found: list[Path] = []
    for parent, directories, names in os.walk(root):
        directories[:] = [name for name in directories if not name.startswith(".")]
        found += [Path(parent, name) for name in names if Path(name).suffix in suffixes and not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).as_posix())


def _is_utf8(file: Path) -> bool:
    try:
        file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _unit(file: Path, unit: Unit | None) -> Unit:
    records = file.suffix in RECORDS
    if unit is None:
        return "field" if records else "file"
    if records and unit != "field":
        raise DataError(f"data.document: {unit} is for plain text; a record's document is its `field`", file)
    if not records and unit == "field":
        raise DataError("data.document: field is for .jsonl and .parquet; plain text has file, line or block", file)
    return unit


@dataclass(frozen=True)
class HubSource:
    dataset: Any  # a datasets.Dataset, memory-mapped
    text_field: str
    label: str
    total_bytes: int

    @classmethod
    def load(cls, section: DataSection, split: str) -> HubSource:
        import datasets

        assert section.dataset is not None
        label = f"data.dataset {section.dataset}, split {split}"
        if section.document not in (None, "field"):
            raise DataError(f"data.document: {section.document} is for plain text; a record's document is its `field`")
        try:
            dataset = datasets.load_dataset(section.dataset, section.dataset_config, split=split)
        except Exception as error:  # datasets raises nearly every kind of exception
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(f"cannot load the dataset: {reason}", label) from error
        check_field(section.text_field, dataset.column_names, label)
        return cls(dataset, section.text_field, label, int(dataset.data.nbytes))

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.dataset._fingerprint}\0{self.text_field}".encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        row = 0
        for batch in self.dataset.select_columns([self.text_field]).iter(batch_size=512):
            for value in batch[self.text_field]:
                row += 1
                text, chat = value_text(value, self.text_field, f"{self.label}, row {row}")
                if text and not text.isspace():
                    yield Document(text, chat, self.total_bytes * row // len(self.dataset))


@dataclass(frozen=True)
class HeldOut:
    """The documents of `source` whose own hash falls below `fraction`, or the rest of them.

    The side depends on a document's content alone, so neither order nor number of documents matter, and equal
    documents are never on both sides.
    """

    source: Source
    fraction: float
    side: Literal["held out", "rest"]

    @property
    def label(self) -> str:
        return f"{self.source.label} ({self.side}, data.eval_fraction {self.fraction})"

    @property
    def total_bytes(self) -> int:
        return self.source.total_bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.source.digest}\0{self.fraction!r}\0{self.side}".encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        limit = int(self.fraction * 2**64)
        for document in self.source.documents():
            content = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
            if (int.from_bytes(content, "little") < limit) == (self.side == "held out"):
                yield document
