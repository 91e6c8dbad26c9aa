"""Read parquet and Arrow files, and datasets, in a process of their own, whose memory is limited.

A file of kilobytes may expand to any size, because pages, batches and dictionaries are decompressed as a whole, and a
damaged file may crash the decoder. Each process that reads tables therefore keeps one table process, which sends the
records of a few megabytes at a time. Turning rows into Python objects takes longer than sending these.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import islice, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aliquot.core.errors import DataError
from aliquot.core.python_command import Worker, limit_memory, requests
from aliquot.data.data_files import LONGEST_RECORD, too_long

MEMORY_BYTES = 2 << 30  # of a table process, in addition to the memory of the interpreter
_ARROW_FILE = b"ARROW1"  # the beginning of an IPC file; a stream has none
_ROWS, _BATCH_BYTES = 512, 16 << 20  # limits of what is read from a table at once

Record = dict[str, Any]
Batches = Iterator[tuple[Any, float]]  # record batches, each with the share of the table that has been read
# An open table in the table process: its pyarrow schema, a function that reads all rows with only the given columns,
# and a function that turns a record batch into records.
OpenTable = tuple[Any, Callable[[list[str]], Batches], Callable[[Any], Sequence[Record]]]
TableOpener = Callable[[], AbstractContextManager[OpenTable]]


class RecordTable(NamedTuple):
    """An open table."""

    schema: Any  # a pyarrow schema
    # Yields the records of a few rows with only the given columns, and the share of the table that has been read.
    read: Callable[[list[str]], Iterator[tuple[Sequence[Record], float]]]


_idle: list[_TableProcess] = []  # table processes that have read their last table to its end
os.register_at_fork(after_in_child=_idle.clear)  # a fork must not share the pipes of its parent


@contextmanager
def in_table_process(open_table: TableOpener, where: str | Path) -> Iterator[RecordTable]:
    """Open a table with `open_table` in a table process. `where`: the name of the table in error messages.

    Raises DataError if the memory of the process does not suffice or if it ends; else the exceptions of `open_table`.
    """
    worker = _idle.pop() if _idle else _TableProcess()
    columns, row, is_at_end = ["its schema"], 0, False

    def read(names: list[str]) -> Iterator[tuple[Sequence[Record], float]]:
        nonlocal columns, row, is_at_end
        columns = names
        worker.send(columns)
        while (answer := worker.receive()) is not None:
            yield answer
            row += len(answer[0])
        is_at_end = True

    try:
        worker.send((open_table, str(where)))
        yield RecordTable(worker.receive(), read)
    except MemoryError:
        raise DataError(
            f"reading {', '.join(columns)} needs more than {MEMORY_BYTES >> 20} MiB of memory, or the file is"
            " damaged: write it again, with smaller pages and batches",
            f"{where}, after row {row}",
        ) from None
    finally:
        if is_at_end:
            _idle.append(worker)
        else:
            worker.close()


class _TableProcess(Worker):
    def __init__(self) -> None:
        super().__init__(
            f"{__name__}:serve",
            ARROW_DEFAULT_MEMORY_POOL="system",
            ARROW_IO_THREADS="1",
            OMP_NUM_THREADS="1",
            OPENBLAS_NUM_THREADS="1",
        )
        self.send(MEMORY_BYTES)


def serve(connection: Connection) -> None:
    """Run the table process: read tables until the parent closes the pipe or dies."""
    import pyarrow.parquet  # noqa: F401

    limit_memory(connection.recv())
    for open_table, where in requests(connection):
        try:
            with open_table() as (schema, read, records):
                connection.send(schema)
                for part in _bounded_records(read(connection.recv()), where, records):
                    connection.send(part)
            connection.send(None)
        except Exception as error:  # whatever the decoder raises
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # the parent could not read this error
                error = DataError(f"it cannot be read ({type(error).__name__}: {error})", where)
            connection.send(error)


@contextmanager
def open_parquet(path: Path) -> Iterator[OpenTable]:
    """Open a parquet file."""
    import pyarrow.parquet

    def read(columns: list[str]) -> Batches:
        """The uncompressed size of a row group limits how many rows are read at once."""
        rows, rows_before = max(file.metadata.num_rows, 1), 0
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            batches = partial(file.iter_batches, row_groups=[index], columns=columns)
            skipped = rows_before
            with suppress(MemoryError):
                for batch in batches(rows_at_once(group.total_byte_size, group.num_rows)):
                    rows_before += len(batch)
                    yield batch, rows_before / rows
                continue
            # Kilobytes may repeat a long text in thousands of rows.
            for batch in islice(batches(1), rows_before - skipped, None):
                rows_before += 1
                yield batch, rows_before / rows

    with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
        yield file.schema_arrow, read, pyarrow.RecordBatch.to_pylist


@contextmanager
def open_arrow(path: Path) -> Iterator[OpenTable]:
    """Open an IPC file, or an IPC stream as in the cache of `datasets`."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
            reader = pyarrow.ipc.open_file(file)
            stored = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            file.seek(0)
            stored = reader = pyarrow.ipc.open_stream(file)

        def read(columns: list[str]) -> Batches:
            done_bytes = 0
            for batch in stored:
                batch.validate(full=True)  # nothing else has looked at the offsets in the file
                done_bytes += batch.nbytes
                yield batch.select(columns), min(1.0, done_bytes / file.size())

        yield reader.schema, read, pyarrow.RecordBatch.to_pylist


def _bounded_records(
    batches: Batches, where: str, records: Callable[[Any], Sequence[Record]]
) -> Iterator[tuple[Sequence[Record], float]]:
    """Yield the records of `batches`, a few megabytes of Python objects at once.

    `where`: the name of the table in error messages. Raises DataError for a row of more than LONGEST_RECORD bytes
    before the row is a Python object.
    """
    row = 0
    for batch, share in batches:
        sizes = sum(map(_row_bytes, batch.columns), np.zeros(len(batch), np.int64))
        if (long := np.flatnonzero(sizes > LONGEST_RECORD)).size:
            raise too_long(f"{where}, row {row + int(long[0]) + 1}")
        parts = np.flatnonzero(np.diff(np.cumsum(sizes) // _BATCH_BYTES)) + 1
        for start, stop in pairwise([0, *parts.tolist(), len(batch)]):
            for first in range(start, stop, _ROWS):
                yield records(batch.slice(first, min(_ROWS, stop - first))), share
        row += len(batch)


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
