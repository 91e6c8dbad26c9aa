"""Turn the `data` section into ordered streams of documents, from files or from Hugging Face's `datasets`.

With data.eval_fraction, each source is divided into a part that is held out for evaluation and a part for training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from aliquot.config.data_section import DataSection, RecordsSection
from aliquot.core.decode import load_yaml, read_json_object
from aliquot.core.errors import ConfigError, DataError
from aliquot.core.small_files import hub_advice, limit_hub_time, read_small_file
from aliquot.data.cache import digests
from aliquot.data.documents import Document, refuse_bad_alone
from aliquot.data.file_source import FileSource, no_report
from aliquot.data.formats import Format, format_of, unknown_field
from aliquot.data.remote_files import NamedProgress
from aliquot.data.table_files import Batches, Record, RecordTable, bounded_records, rows_at_once
from aliquot.data.table_records import table_documents


class Source(Protocol):
    """An ordered stream of documents."""

    @property
    def label(self) -> str:
        """The name of the source in error messages."""

    @property
    def total_bytes(self) -> int:
        """The value of `Document.done_bytes` at the end of the source, for progress."""

    @property
    def digest(self) -> str:
        """Hash of the content and of its division into documents, independent of paths and times."""

    def documents(self) -> Iterator[Document]:
        """Yield all documents, including blank records, always in the same order."""


def sources_of(
    section: DataSection, cache: Path, report: NamedProgress = no_report
) -> tuple[dict[str, Source], dict[str, Source]]:
    """Return (training sources, evaluation sources), each by name; the name of unnamed data is "".

    `report` is called while files are copied from an object store.
    Raises UserError as `source_of` does, or if two evaluation sources have the same name.
    """
    if section.sources is None:
        train = {"": source_of(section, cache, report=report)}
    else:
        keys = ((entry, f"data.sources, {entry.name}:") for entry in section.sources)
        train = {entry.name: source_of(entry, cache, key, report) for entry, key in keys}
    held_out: dict[str, Source] = {}
    if section.eval_path is not None:
        eval_section = section.model_copy(update={"path": section.eval_path, "dataset": None})
        held_out[""] = replace(FileSource.find(eval_section, cache, "data.eval_path", report), names_own_fields=False)
    elif section.eval_split is not None:
        held_out[""] = HubSource.load(section.model_copy(update={"split": section.eval_split}), cache, "data.dataset")
    elif (fraction := section.eval_fraction) > 0:
        held_out = {name: HeldOut(source, fraction, "held out") for name, source in train.items()}
        train = {name: HeldOut(source, fraction, "rest") for name, source in train.items()}
    for entry in section.eval_sources:
        if entry.name in held_out:
            raise ConfigError(
                f"data.eval_sources: data.eval_fraction holds out a part of {entry.name}, which has this name already"
            )
        held_out[entry.name] = source_of(entry, cache, f"data.eval_sources, {entry.name}:", report)
    return train, held_out


def joined(sources: Sequence[Source]) -> Source:
    """Return one source that yields the documents of all `sources` in turn."""
    return sources[0] if len(sources) == 1 else Joined(tuple(sources))


def source_of(section: RecordsSection, cache: Path, key: str = "", report: NamedProgress = no_report) -> Source:
    """Return the source that a section of the configuration describes.

    `cache`: the directory in which digests of files are stored. `key`: the key of the section, for error messages.
    Raises UserError if there is nothing to read, or if the setting `document` does not fit the files.
    """
    if section.path is not None:
        return FileSource.find(section, cache, f"{key} path" if key else "data.path", report)
    return HubSource.load(section, cache, f"{key} dataset" if key else "data.dataset")


@dataclass(frozen=True)
class HubSource:
    """The documents of a data set that `datasets` has loaded."""

    dataset: Any  # a datasets.Dataset, memory-mapped
    section: RecordsSection
    form: Format
    label: str
    total_bytes: int
    tables: tuple[Path, ...]  # the dataset's Arrow files, if it comes from a local directory; else empty
    cache: Path  # directory of stored digests

    @classmethod
    def load(cls, section: RecordsSection, cache: Path, key: str) -> HubSource:
        import datasets

        assert section.dataset is not None
        label = f"{key} {section.dataset}, split {section.split}"
        if section.document not in (None, "field"):
            raise DataError(f"data.document: {section.document} is for plain text; a record's document is its `field`")
        limit_hub_time()
        try:
            if saved := _saved_tables(Path(section.dataset)):
                dataset = datasets.load_dataset("arrow", data_files=saved, split=section.split)
            else:
                dataset = datasets.load_dataset(section.dataset, section.dataset_config, split=section.split)
        except DataError:
            raise
        except Exception as error:  # datasets raises nearly every kind of exception
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            advice = "" if Path(section.dataset).exists() else f". {hub_advice(section.dataset, 'dataset')}"
            raise DataError(f"cannot load the dataset: {reason}{advice}", label) from error
        local = Path(section.dataset).exists()
        if unknown := unknown_field(section.unused_fields, dataset.column_names, label):
            raise unknown
        return cls(
            dataset=dataset,
            section=section,
            form=format_of(section, dataset.column_names, label),
            label=label,
            total_bytes=int(dataset.data.nbytes),
            tables=tuple(Path(file["filename"]) for file in dataset.cache_files) if local else (),
            cache=cache,
        )

    @cached_property
    def digest(self) -> str:
        # The fingerprint identifies a dataset of the hub. For a local directory, the path and times also change it.
        content = [self.dataset._fingerprint]
        if self.tables:
            content = [self.section.split, *digests(self.tables, self.cache)]
        return hashlib.sha256("\0".join([*content, repr(self.form)]).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield all documents. Raises UserError if no record can be read."""
        table = RecordTable(self.dataset.features.arrow_schema, self._read)
        return refuse_bad_alone(table_documents(table, self.section, self.form, self.label, self.total_bytes))

    def _read(self, columns: list[str]) -> Iterator[tuple[Sequence[Record], float]]:
        return bounded_records(self._batches(columns), self.label, self._rows)

    def _batches(self, columns: list[str]) -> Batches:
        rows, selected = 0, self.dataset.select_columns(columns).with_format("arrow")
        for table in selected.iter(batch_size=rows_at_once(self.total_bytes, len(self.dataset))):
            for batch in table.to_batches():
                rows += len(batch)
                yield batch, rows / len(self.dataset)

    def _rows(self, batch: Any) -> list[Record]:
        values = self.dataset.features.decode_batch(batch.to_pydict())
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _saved_tables(directory: Path) -> list[str]:
    """Return the Arrow files of a directory that `Dataset.save_to_disk` wrote, in order; [] for other directories.

    Raises DataError if a file that describes the directory names data outside of it.
    """
    from datasets.config import REPOYAML_FILENAME
    from huggingface_hub import DatasetCard

    described: list[Any] = []
    if (state := directory / "state.json").is_file():
        described.append(read_json_object(state).get("_data_files") or [])
    files = [str(directory / file["filename"]) for saved in described for file in saved]
    if (card := directory / "README.md").is_file():
        described.append(DatasetCard.load(card, ignore_metadata_errors=True).data.to_dict().get("configs"))
    if (settings := directory / REPOYAML_FILENAME).is_file():
        described.append(load_yaml(read_small_file(settings).decode())[0])
    for name in _texts(described):
        if name.startswith(("/", "~")) or "://" in name or ".." in Path(name).parts:
            raise DataError(f"{name} is named in it, but lies outside: put a copy into this directory", directory)
    return files


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value of YAML or JSON."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


@dataclass(frozen=True)
class HeldOut:
    """One side of a source that is divided into a held-out part and the rest, by a hash of each document.

    A document is held out if its hash, scaled to [0, 1), is below `fraction`. The side depends only on the content of
    the document, not on the order or number of documents. Equal documents are therefore on the same side.
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
        limit, begins, held_out = int(self.fraction * 2**64), True, False
        for document in self.source.documents():
            if begins:  # the first part of a long document decides for the whole document
                content = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
                held_out = int.from_bytes(content, "little") < limit
            begins = document.ended
            if held_out == (self.side == "held out"):
                yield document


@dataclass(frozen=True)
class Joined:
    """The documents of several sources, one source after another."""

    sources: tuple[Source, ...]

    @property
    def label(self) -> str:
        return ", ".join(source.label for source in self.sources)

    @property
    def total_bytes(self) -> int:
        return sum(source.total_bytes for source in self.sources)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\0".join(source.digest for source in self.sources).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        before_bytes = 0
        for source in self.sources:
            for document in source.documents():
                yield document._replace(done_bytes=before_bytes + document.done_bytes)
            before_bytes += source.total_bytes
