"""Stream the rows of tables (CSV, parquet, Arrow) as records, and turn each record into a document."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from aliquot.config.data_section import RecordsSection
from aliquot.core.errors import DataError
from aliquot.data.data_files import (
    COMPRESSED,
    LONGEST_RECORD,
    lines_within_limit,
    not_text,
    opened,
    refuse_pointer,
    too_long,
)
from aliquot.data.documents import (
    HOLDS_NUL,
    NO_TEXT,
    ROW_OF_OTHER_LENGTH,
    BadRecordError,
    Document,
    repeated_name,
)
from aliquot.data.formats import Format, RecordReader, format_of

_ARROW_FILE = b"ARROW1"  # the beginning of an IPC file; a stream has none
_DICTIONARY_PAGE = b"\x15\x04"  # the beginning of the header of a page: its type, in Thrift's compact protocol
_ROWS, _BATCH_BYTES = 512, 16 << 20  # limits of what is read from a table at once


def csv_documents(path: Path, section: RecordsSection) -> Iterator[Document]:
    """Yield the document of each row of a CSV file, whose first line names the columns."""
    csv.field_size_limit(LONGEST_RECORD)
    with opened(path) as (file, position):
        decoded = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = csv.reader(lines_within_limit(decoded, path), strict=True)
        try:
            names = next(rows, [])
            _refuse_repeated([name for name in names if name], path)
            reader = RecordReader(section, format_of(section, names, path))
            for row in filter(None, rows):
                where = f"{path}:{rows.line_num}"
                yield reader.document(partial(_record_of_row, names, row, where), where, position())
        except csv.Error as error:
            raise DataError(f"not CSV ({error})", f"{path}:{rows.line_num}") from error
        except UnicodeDecodeError as error:
            raise not_text(error, f"{path}, after line {rows.line_num}") from error


def _record_of_row(names: list[str], row: list[str], where: str) -> dict[str, str]:
    if len(row) != len(names):
        message = f"{len(row)} values, but the first line names {len(names)}"
        raise BadRecordError(message, where, ROW_OF_OTHER_LENGTH)
    if any("\0" in value for value in row):
        raise BadRecordError(f"a NUL byte: {NO_TEXT}", where, HOLDS_NUL)
    return dict(zip(names, row, strict=True))


class RecordTable(NamedTuple):
    """An open table."""

    schema: Any  # a pyarrow schema
    # Yields all rows with only the given columns, each batch with the share of the table that has been read.
    read: Callable[[list[str]], Iterator[tuple[Any, float]]]
    rows: Callable[[Any], Iterable[dict[str, Any]]] = lambda batch: batch.to_pylist()


def table_documents(
    table: RecordTable, section: RecordsSection, form: Format, where: str | Path, size_bytes: int
) -> Iterator[Document]:
    """Yield the document of each row of a table of `size_bytes` bytes. `where`: its name in error messages."""
    columns, row = form.columns(table.schema.names), 0
    reader = RecordReader(section, form, table.schema.names, _unread_columns(table.schema, columns, section))
    try:
        for batch, share in table.read(columns):
            for part in _parts(batch, where, row):
                for record in table.rows(part):
                    row += 1
                    yield reader.document(partial(as_written, record), f"{where}, row {row}", int(size_bytes * share))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text ({error.reason})", f"{where}, after row {row}") from error


def binary_documents(
    title: str, open_table: Callable[[Path], AbstractContextManager[RecordTable]], path: Path, section: RecordsSection
) -> Iterator[Document]:
    """Yield the document of each row of a file that `open_table` reads."""
    import pyarrow

    if path.suffix.lower() in COMPRESSED:
        raise DataError(f"{title} is read in any order, which an archive is not: unpack it first", path)
    refuse_pointer(path)
    try:
        with open_table(path) as table:
            _refuse_repeated(table.schema.names, path)
            form = format_of(section, table.schema.names, path)
            yield from table_documents(table, section, form, path, path.stat().st_size)
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable {title} file ({error})", path) from error


@contextmanager
def open_parquet(path: Path) -> Iterator[RecordTable]:
    """Open a parquet file."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path)
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    leaves = (group.column(index) for group in groups for index in range(group.num_columns))
    # A repeated text stays a reference into the dictionary: kilobytes may repeat a long text in thousands of rows.
    with path.open("rb") as pages:
        texts = {leaf.path_in_schema for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and _repeats(leaf, pages)}

    def read(columns: list[str]) -> Iterator[tuple[Any, float]]:
        """The uncompressed size of a row group limits how many rows are read at once."""
        rows, rows_before = max(file.metadata.num_rows, 1), 0
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            at_once = rows_at_once(group.total_byte_size, group.num_rows)
            for batch in file.iter_batches(batch_size=at_once, row_groups=[index], columns=columns):
                rows_before += len(batch)
                yield batch, rows_before / rows

    with pyarrow.parquet.ParquetFile(path, read_dictionary=sorted(texts)) as file:
        yield RecordTable(file.schema_arrow, read)


def _repeats(leaf: Any, pages: BinaryIO) -> bool:
    """Return whether a column of a row group has a dictionary, although its metadata may deny it."""
    pages.seek(max(0, leaf.data_page_offset))
    return leaf.has_dictionary_page or pages.read(len(_DICTIONARY_PAGE)) == _DICTIONARY_PAGE


@contextmanager
def open_arrow(path: Path) -> Iterator[RecordTable]:
    """Open an IPC file, or an IPC stream as in the cache of `datasets`."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
            reader = pyarrow.ipc.open_file(file)
            stored = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            file.seek(0)
            stored = reader = pyarrow.ipc.open_stream(file)

        def read(columns: list[str]) -> Iterator[tuple[Any, float]]:
            done_bytes = 0
            for batch in stored:
                done_bytes += batch.nbytes
                yield batch.select(columns), min(1.0, done_bytes / file.size())

        yield RecordTable(reader.schema, read)


def _unread_columns(schema: Any, columns: list[str], section: RecordsSection) -> list[str]:
    """Return the columns of text, of a table with a pyarrow schema, that are neither in `columns` nor meant to be."""
    types = zip(schema.names, map(str, schema.types), strict=True)
    texts = [
        name for name, kind in types if kind.removeprefix("dictionary<values=").startswith(("string", "large_str"))
    ]
    return [name for name in texts if name not in columns and name not in section.unused_fields]


def _parts(batch: Any, where: str | Path, row: int) -> Iterator[Any]:
    """Yield parts of a record batch, each a few megabytes as Python objects.

    `row`: number of rows before the batch. Raises DataError for a row of more than LONGEST_RECORD bytes.
    """
    sizes = sum(map(_row_bytes, batch.columns), np.zeros(len(batch), np.int64))
    if (long := np.flatnonzero(sizes > LONGEST_RECORD)).size:
        raise too_long(f"{where}, row {row + int(long[0]) + 1}")
    parts = np.flatnonzero(np.diff(np.cumsum(sizes) // _BATCH_BYTES)) + 1
    for start, stop in pairwise([0, *parts.tolist(), len(batch)]):
        for first in range(start, stop, _ROWS):
            yield batch.slice(first, min(_ROWS, stop - first))


def _row_bytes(array: Any) -> Any:
    """Return the bytes of each element of an Arrow array as a Python object, without making the object: [rows]."""
    import pyarrow
    from pyarrow import compute, types

    array = getattr(array, "storage", array)  # of an extension type, such as JSON
    kind = array.type
    if types.is_dictionary(kind):
        return np.append(_row_bytes(array.dictionary), 0)[compute.fill_null(array.indices, -1).to_numpy(False)]
    if types.is_struct(kind):
        return sum(map(_row_bytes, array.flatten()), np.zeros(len(array), np.int64))
    if types.is_fixed_size_list(kind):
        array = array.cast(pyarrow.list_(kind.value_type))
    if isinstance(array, pyarrow.ListArray | pyarrow.LargeListArray):  # a map is a list, too
        totals = np.append(0, np.cumsum(_row_bytes(array.values)))
        return np.diff(totals[array.offsets.to_numpy(False)])
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)  # a view begins with its length
        return views[array.offset :][: len(array), 0] * array.is_valid().to_numpy(False)
    if types.is_null(kind) or types.is_primitive(kind) or types.is_decimal(kind):
        return np.full(len(array), 8)
    return compute.fill_null(compute.cast(compute.binary_length(array), "int64"), 0).to_numpy(False)


def rows_at_once(size_bytes: int, rows: int) -> int:
    """Return how many rows to read at once, of a table of `rows` rows and `size_bytes` bytes uncompressed.

    The rows are in memory twice: as a table and as Python objects.
    """
    return max(1, min(_ROWS, _BATCH_BYTES * rows // max(size_bytes, 1)))


def as_written(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row as its author wrote it, without the nulls that a table adds to objects inside fields.

    A table gives each object in a column the keys of all objects in this column.
    """

    def without_nulls(value: Any) -> Any:
        if isinstance(value, list):
            return [without_nulls(item) for item in value]
        if isinstance(value, dict):
            return {key: without_nulls(item) for key, item in value.items() if item is not None}
        return value

    return {key: without_nulls(value) for key, value in record.items()}


def _refuse_repeated(columns: list[str], path: Path) -> None:
    for name, times in Counter(columns).most_common(1):
        if times > 1:
            raise DataError(repeated_name("column", name, times), path)
