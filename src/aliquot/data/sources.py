"""Turn the `data` section into ordered streams of documents, from files or from Hugging Face's `datasets`.

With data.eval_fraction, each source is divided into a part that is held out for evaluation and a part for training.
"""

from __future__ import annotations

import hashlib
import json
import math
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol

from aliquot.config.data_section import MOST_HELD_OUT, DataSection, RecordsSection
from aliquot.config.section import texts_in
from aliquot.core.decode import load_yaml, read_json_object
from aliquot.core.errors import ConfigError, DataError
from aliquot.core.small_files import hub_advice, limit_hub_time, read_small_file
from aliquot.data.cache import digests
from aliquot.data.documents import Document, refuse_bad_alone
from aliquot.data.file_source import FileSource, no_report
from aliquot.data.formats import Format, format_of, unknown_field
from aliquot.data.record_files import table_documents
from aliquot.data.remote_files import NamedProgress
from aliquot.data.table_files import Batches, OpenTable, Record, TableOpener, in_table_process, rows_at_once

_FACTS = b"aliquot"  # the key of these facts in the metadata of a dataset's schema: fingerprint, bytes, tables


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
    """The documents of a dataset of `datasets`."""

    opener: TableOpener
    section: RecordsSection
    form: Format
    label: str
    total_bytes: int
    fingerprint: str  # identifies a dataset of the hub
    tables: tuple[Path, ...]  # the dataset's Arrow files, if it comes from a local directory; else empty
    cache: Path  # directory of stored digests

    @classmethod
    def load(cls, section: RecordsSection, cache: Path, key: str) -> HubSource:
        assert section.dataset is not None
        label = f"{key} {section.dataset}, split {section.split}"
        if section.document not in (None, "field"):
            raise DataError(f"data.document: {section.document} is for plain text; a record's document is its `field`")
        path = Path(section.dataset)
        name = str(path.absolute()) if path.exists() else section.dataset  # the working directory may change
        opener = partial(_open_dataset, name, section.dataset_config, section.split, label)
        with in_table_process(opener, label) as table:
            list(table.read([]))
        if unknown := unknown_field(section.unused_fields, table.schema.names, label):
            raise unknown
        facts = json.loads(table.schema.metadata[_FACTS])
        return cls(
            opener=opener,
            section=section,
            form=format_of(section, table.schema.names, label),
            label=label,
            total_bytes=facts["bytes"],
            fingerprint=facts["fingerprint"],
            tables=tuple(map(Path, facts["tables"])),
            cache=cache,
        )

    @cached_property
    def digest(self) -> str:
        # The path and times also change the fingerprint.
        content = [self.section.split, *digests(self.tables, self.cache)] if self.tables else [self.fingerprint]
        return hashlib.sha256("\0".join([*content, repr(self.form)]).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield all documents. Raises UserError if no record can be read."""
        with in_table_process(self.opener, self.label) as table:
            yield from refuse_bad_alone(table_documents(table, self.section, self.form, self.label, self.total_bytes))


@contextmanager
def _open_dataset(name: str, config: str | None, split: str, label: str) -> Iterator[OpenTable]:
    """Open a dataset of the hub or of a directory. Without columns, its `read` reads no row.

    `label`: the dataset in error messages. Raises DataError, or MemoryError.
    """
    import datasets

    limit_hub_time()
    Path(datasets.config.HF_DATASETS_CACHE).mkdir(parents=True, exist_ok=True)
    # No file that this process writes may take more than half of the free space, because archives expand.
    file_bytes = shutil.disk_usage(datasets.config.HF_DATASETS_CACHE).free // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        saved = _saved_tables(Path(name))
        source = {"path": "arrow", "data_files": saved} if saved else {"path": name, "name": config}
        dataset = datasets.load_dataset(**source, split=split)
    except DataError:
        raise
    except Exception as error:  # datasets raises nearly every kind of exception
        cause = error.__cause__ or error  # datasets replaces the error of a decoder
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        advice = "" if Path(name).exists() else f". {hub_advice(name, 'dataset')}"
        raise (
            cause if isinstance(cause, MemoryError) else DataError(f"cannot load the dataset: {reason}{advice}", label)
        ) from error

    def read(columns: list[str]) -> Batches:
        rows, selected = 0, dataset.select_columns(columns).with_format("arrow")
        for table in selected.iter(batch_size=rows_at_once(dataset.data.nbytes, len(dataset))) if columns else ():
            for batch in table.to_batches():
                rows += len(batch)
                yield batch, rows / len(dataset)

    def records(batch: Any) -> list[Record]:
        values = dataset.features.decode_batch(batch.to_pydict())
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    facts = {
        "fingerprint": dataset._fingerprint,
        "bytes": int(dataset.data.nbytes),
        "tables": [file["filename"] for file in dataset.cache_files] if Path(name).exists() else [],
    }
    yield dataset.features.arrow_schema.with_metadata({_FACTS: json.dumps(facts)}), read, records


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
    for name in texts_in(described):
        if name.startswith(("/", "~")) or "://" in name or ".." in Path(name).parts:
            raise DataError(f"{name} is named in it, but lies outside: put a copy into this directory", directory)
    return files


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
        limit, is_empty = int(self.fraction * 2**64), True
        for document, number in self._hashed():
            if (number < limit) == (self.side == "held out"):
                is_empty = False
                yield document
        fractions = [number / 2**64 for _, number in self._hashed()] if is_empty else []
        if fractions:
            least = math.ceil(1000 * min(fractions)) / 1000
            is_possible = least <= min(max(fractions), MOST_HELD_OUT)
            raise DataError(
                f"no document is {'left to train on' if self.side == 'rest' else 'held out'}:"
                f" set {f'data.eval_fraction: {least}' if is_possible else 'data.eval_path instead'}."
                " A text file is one document, unless data.document is line or block",
                self.label,
            )

    def _hashed(self) -> Iterator[tuple[Document, int]]:
        """Yield each document, or part of a long one, and a hash of its document, which the first part determines."""
        begins, number = True, 0
        for document in self.source.documents():
            if begins:
                number = int.from_bytes(hashlib.blake2b(document.text.encode(), digest_size=8).digest(), "little")
            begins = document.ended
            yield document, number
