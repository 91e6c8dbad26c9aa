"""Stream the rows of tables (CSV, parquet, Arrow) as records, and turn each record into a document."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from aliquot.config.data_section import RecordsSection
from aliquot.core.errors import DataError
from aliquot.data.data_files import COMPRESSED, LONGEST_RECORD, lines_within_limit, not_text, opened, refuse_pointer
from aliquot.data.documents import (
    HOLDS_NUL,
    NO_TEXT,
    ROW_OF_OTHER_LENGTH,
    BadRecordError,
    Document,
    repeated_name,
)
from aliquot.data.formats import RecordReader, format_of

_ARROW_FILE = b"ARROW1"  # the beginning of an IPC file; a stream has none
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
    return _table_documents(path, section, "parquet", _open_parquet)


def arrow_documents(path: Path, section: RecordsSection) -> Iterator[Document]:
    """Yield the document of each row of an Arrow file: an IPC file, or an IPC stream as in the cache of `datasets`."""
    return _table_documents(path, section, "Arrow", _open_arrow)


Rows = tuple[list[dict[str, Any]], float]  # some rows of a table, and the share of the table that has been read


class _Table(NamedTuple):
    """An open table."""

    columns: list[str]
    read: Callable[[list[str]], Iterator[Rows]]  # yields all rows with only the given columns


def _table_documents(
    path: Path, section: RecordsSection, title: str, open_table: Callable[[Path], AbstractContextManager[_Table]]
) -> Iterator[Document]:
    import pyarrow

    if path.suffix.lower() in COMPRESSED:
        raise DataError(f"{title} is read in any order, which an archive is not: unpack it first", path)
    size_bytes, row = path.stat().st_size, 0
    refuse_pointer(path)
    try:
        with open_table(path) as table:
            _refuse_repeated(table.columns, path)
            form = format_of(section, table.columns, path)
            reader = RecordReader(section, form)
            for records, share in table.read(form.columns(table.columns)):
                for record in records:
                    row += 1
                    yield reader.document(partial(as_written, record), f"{path}, row {row}", int(size_bytes * share))
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable {title} file ({error})", path) from error
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text ({error.reason})", f"{path}, after row {row}") from error


@contextmanager
def _open_parquet(path: Path) -> Iterator[_Table]:
    import pyarrow.parquet

    def read(columns: list[str]) -> Iterator[Rows]:
        """The uncompressed size of a row group limits how many rows are read at once."""
        rows, rows_before = max(file.metadata.num_rows, 1), 0
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            at_once = rows_at_once(group.total_byte_size, group.num_rows)
            for batch in file.iter_batches(batch_size=at_once, row_groups=[index], columns=columns):
                rows_before += len(batch)
                yield batch.to_pylist(), rows_before / rows

    with pyarrow.parquet.ParquetFile(path) as file:
        yield _Table(file.schema_arrow.names, read)


@contextmanager
def _open_arrow(path: Path) -> Iterator[_Table]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
            reader = pyarrow.ipc.open_file(file)
            stored = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            file.seek(0)
            stored = reader = pyarrow.ipc.open_stream(file)

        def read(columns: list[str]) -> Iterator[Rows]:
            done_bytes = 0
            for batch in stored:
                at_once = rows_at_once(batch.nbytes, batch.num_rows)
                for start in range(0, batch.num_rows, at_once):
                    part = batch.slice(start, at_once)
                    done_bytes += part.nbytes
                    yield part.select(columns).to_pylist(), min(1.0, done_bytes / file.size())

        yield _Table(reader.schema.names, read)


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
