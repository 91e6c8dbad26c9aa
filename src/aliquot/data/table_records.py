"""Stream the rows of tables (CSV, parquet, Arrow) as records, and turn each record into a document."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from aliquot.config.data_section import RecordsSection
from aliquot.core.decode import without_nulls
from aliquot.core.errors import DataError
from aliquot.data.data_files import (
    COMPRESSED,
    LONGEST_RECORD,
    lines_within_limit,
    not_text,
    opened,
    refuse_pointer,
)
from aliquot.data.documents import (
    HOLDS_NUL,
    NO_TEXT,
    BadRecordError,
    Document,
    repeated_name,
)
from aliquot.data.format_detection import RecordReader, format_of
from aliquot.data.formats import Format
from aliquot.data.table_files import OpenTable, RecordTable, in_table_process


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
        raise BadRecordError(
            f"{len(row)} values, but the first line names {len(names)}",
            where,
            "a row with more or fewer values than the header has names, left out",
        )
    if any("\0" in value for value in row):
        raise BadRecordError(f"a NUL byte: {NO_TEXT}", where, HOLDS_NUL)
    return dict(zip(names, row, strict=True))


def table_documents(
    table: RecordTable, section: RecordsSection, form: Format, where: str | Path, size_bytes: int
) -> Iterator[Document]:
    """Yield the document of each row of a table of `size_bytes` bytes. `where`: its name in error messages."""
    columns, row = form.columns(table.schema.names), 0
    reader = RecordReader(section, form, table.schema.names, _unread_columns(table.schema, columns, section))
    try:
        for records, share in table.read(columns):
            for record in records:
                row += 1
                yield reader.document(partial(as_written, record), f"{where}, row {row}", int(size_bytes * share))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text ({error.reason})", f"{where}, after row {row}") from error


def binary_documents(
    title: str, open_table: Callable[[Path], AbstractContextManager[OpenTable]], path: Path, section: RecordsSection
) -> Iterator[Document]:
    """Yield the document of each row of a file that `open_table` opens."""
    import pyarrow

    if path.suffix.lower() in COMPRESSED:
        raise DataError(f"{title} is read in any order, which an archive is not: unpack it first", path)
    refuse_pointer(path)
    try:
        with in_table_process(partial(open_table, path.absolute()), path) as table:  # the working directory may change
            _refuse_repeated(table.schema.names, path)
            form = format_of(section, table.schema.names, path)
            yield from table_documents(table, section, form, path, path.stat().st_size)
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable {title} file ({error})", path) from error


def _unread_columns(schema: Any, columns: list[str], section: RecordsSection) -> list[str]:
    """Return the columns of text, of a table with a pyarrow schema, that are neither in `columns` nor meant to be."""
    types = zip(schema.names, map(str, schema.types), strict=True)
    texts = [
        name for name, kind in types if kind.removeprefix("dictionary<values=").startswith(("string", "large_str"))
    ]
    return [name for name in texts if name not in columns and name not in section.unused_fields]


def as_written(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row as its author wrote it, without the nulls that a table adds to objects inside fields.

    A table gives each object in a column the keys of all objects in this column.
    """
    return {key: without_nulls(value) for key, value in record.items()}


def _refuse_repeated(columns: list[str], path: Path) -> None:
    for name, times in Counter(columns).most_common(1):
        if times > 1:
            raise DataError(repeated_name("column", name, times), path)
