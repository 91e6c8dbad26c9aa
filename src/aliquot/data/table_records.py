"""Stream the rows of tables (CSV, parquet) as records, and turn each record into a document."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from aliquot.config.data_section import RecordsSection
from aliquot.core.errors import DataError
from aliquot.data.data_files import LONGEST_RECORD, lines_within_limit, not_text, opened, refuse_pointer
from aliquot.data.documents import (
    HOLDS_NUL,
    NO_TEXT,
    ROW_OF_OTHER_LENGTH,
    BadRecordError,
    Document,
    repeated_name,
)
from aliquot.data.formats import RecordReader, format_of

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


def parquet_documents(path: Path, section: RecordsSection) -> Iterator[Document]:
    """Yield the document of each row of a parquet file."""
    import pyarrow
    import pyarrow.parquet

    if path.suffix.lower() != ".parquet":
        raise DataError("parquet is read in any order, which an archive is not: unpack it first", path)
    size_bytes = path.stat().st_size
    refuse_pointer(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _refuse_repeated(names, path)
            form = format_of(section, names, path)
            rows, row = max(file.metadata.num_rows, 1), 0
            reader = RecordReader(section, form)
            for record in _rows(file, form.columns(names)):
                row += 1
                yield reader.document(partial(as_written, record), f"{path}, row {row}", size_bytes * row // rows)
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable parquet file ({error})", path) from error
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text ({error.reason})", f"{path}, after row {row}") from error


def _rows(file: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file. The uncompressed size of a row group limits how many rows are read at once."""
    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        at_once = rows_at_once(group.total_byte_size, group.num_rows)
        for batch in file.iter_batches(batch_size=at_once, row_groups=[index], columns=columns):
            yield from batch.to_pylist()


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
