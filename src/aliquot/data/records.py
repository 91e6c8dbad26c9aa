"""Stream records from JSON lines, JSON arrays, CSV and parquet files, and turn each record into a document."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from aliquot.config.data_section import RecordsSection
from aliquot.core.decode import TooDeepError, UniqueKeys, check_json_depth, decode_json
from aliquot.core.errors import DataError
from aliquot.data.data_files import not_text, opened, refuse_pointer, suffix_of
from aliquot.data.documents import (
    HALF_CHARACTER,
    HOLDS_NUL,
    KEY_TWICE,
    NO_RECORD,
    NO_TEXT,
    ROW_OF_OTHER_LENGTH,
    BadRecordError,
    Document,
    Kind,
    left_out,
)
from aliquot.data.formats import Format, format_of

LONGEST_RECORD = 1 << 26  # bytes or characters of a record, which is in memory as a whole
LONGEST_BYTES = 64 << 20  # of a file with one JSON object over several lines, which is read as a whole
_BLOCK_CHARACTERS = 1 << 20
_ROWS, _BATCH_BYTES = 512, 16 << 20  # limits of what is read from a table at once
_NEAR_THE_END = 16  # characters; an error this near the end may come from a value that is cut off


def record_documents(path: Path, section: RecordsSection) -> Iterator[Document]:
    """Yield one document for each record, even a blank one, of a .jsonl, .json, .csv or .parquet file.

    A record that cannot be read becomes a blank document with a reason. Raises UserError for a malformed or truncated
    file, and for a record of another format than the first one.
    """
    return RECORDS[suffix_of(path)](path, section)


@dataclass
class RecordReader:
    """Turns the records of a file or table into documents. The first readable record decides the format of all."""

    section: RecordsSection
    form: Format | None = None

    def document(self, record: Callable[[], object], where: str, done_bytes: int) -> Document:
        """Return the document of a record; if the record cannot be read, a blank document with the reason."""
        try:
            text, kind = self._read(record(), where)
            text.encode()  # raises an error if JSON escapes half of a surrogate pair
            return Document(text, kind, done_bytes, where=where)
        except BadRecordError as error:
            return left_out(error, done_bytes)
        except UnicodeEncodeError:
            message = "a field holds half of a surrogate pair, which is no text"
            return left_out(BadRecordError(message, where, HALF_CHARACTER), done_bytes)

    def _read(self, record: object, where: str) -> tuple[str, Kind]:
        if not isinstance(record, dict):
            raise BadRecordError(f"a record must be a JSON object, not {type(record).__name__}", where, NO_RECORD)
        form = self.form or _format_of(self.section, record, where)
        form.check(record, where)
        text_and_kind = form.read(record, where)
        self.form = form
        return text_and_kind


def _format_of(section: RecordsSection, record: dict[str, Any], where: str) -> Format:
    """Return the format of a record. Raises the errors of `format_of`.

    For an object that holds a list of records, the error says how to extract the list.
    """
    try:
        return format_of(section, record, where)
    except BadRecordError as error:
        lists = {key: value for key, value in record.items() if isinstance(value, list) and value}
        key = next((key for key, value in lists.items() if all(map(_may_be_record, value))), None)
        if key is None:
            raise
        raise BadRecordError(
            f"one JSON object with the keys {', '.join(record)}, of which {key!r} holds a list of {len(record[key])}:"
            f" if those are the records, write that list alone (jq .{key} FILE > RECORDS.json)",
            where,
            error.reason,
        ) from error


def _may_be_record(item: object) -> bool:
    return isinstance(item, dict) and not {"role", "from"} & item.keys()  # a dict with these keys is a chat message


def _jsonl(path: Path, section: RecordsSection) -> Iterator[Document]:
    with opened(path) as (file, position):
        yield from _json_lines(file, position, path, section)


def _json(path: Path, section: RecordsSection) -> Iterator[Document]:
    """Yield the records of a .json file: a JSON array, one record per line, or one object over several lines."""
    with opened(path) as (file, _):
        start = file.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip()
    if start.startswith(b"{") and (whole := _whole_object(path, start)) is not None:
        record = partial(_unambiguous, *whole, str(path))
        yield RecordReader(section).document(record, str(path), path.stat().st_size)
        return
    with opened(path) as (file, position):
        read = _json_array if start.startswith(b"[") else _json_lines
        yield from read(file, position, path, section)


def _json_lines(file: BinaryIO, position: Callable[[], int], path: Path, section: RecordsSection) -> Iterator[Document]:
    reader = RecordReader(section)
    for number, line in enumerate(_bounded(file, path), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield reader.document(partial(_record_in, line, where), where, position())


def _record_in(line: bytes, where: str) -> object:
    keys = UniqueKeys()
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode()  # json.loads would accept surrogates encoded in bytes
        record = decode_json(text, object_pairs_hook=keys)
    except UnicodeDecodeError as error:
        raise not_text(error, where) from error
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError) and not line.endswith(b"\n") and _is_cut(error, text):
            message = f"the last record is cut off ({error}): a part of the file is missing. Fetch it again"
            raise DataError(message, where) from error
        raise BadRecordError(f"not a JSON record ({error}); write one record a line", where, NO_RECORD) from error
    return _unambiguous(record, _repeated(keys), where)


def _is_cut(error: json.JSONDecodeError, text: str) -> bool:
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip())


def _unambiguous(record: object, repeated: str, where: str) -> object:
    """Return the record. Raises BadRecordError if `repeated`, the message about a repeated key, is not empty."""
    if repeated:
        raise BadRecordError(repeated, where, KEY_TWICE)
    return record


def _repeated(keys: UniqueKeys) -> str:
    return _stands_often("key", *keys.repeated) if keys.repeated else ""


def _stands_often(what: str, name: str, times: int) -> str:
    return f"the {what} {name!r} stands {times} times: which one is meant? Rename or remove the others"


def _refuse_repeated(columns: list[str], path: Path) -> None:
    for name, times in Counter(columns).most_common(1):
        if times > 1:
            raise DataError(_stands_often("column", name, times), path)


def _bounded(file: BinaryIO | io.TextIOWrapper, path: Path) -> Iterator[Any]:
    """Yield the lines of `file`.

    Raises DataError at a line longer than LONGEST_RECORD, because even a small compressed file may hold a huge line.
    """
    for number in itertools.count(1):
        line = file.readline(LONGEST_RECORD + 1)
        if len(line) > LONGEST_RECORD:
            raise _too_long(f"{path}:{number}")
        if not line:
            return
        yield line


def _too_long(where: str | Path) -> DataError:
    return DataError(f"a record of more than {LONGEST_RECORD >> 20} MiB: give its text as a file of its own", where)


def _whole_object(path: Path, start: bytes) -> tuple[object, str] | None:
    """Return (object, message about a repeated key) of a file that is one JSON object over several lines.

    The message is empty if no key is repeated. Returns None if the first line is a record, or if the file is not a JSON
    object. Raises DataError if the file holds several objects.
    """
    line, ended, _ = start.partition(b"\n")
    if not ended or _is_json(line):
        return None
    with opened(path) as (file, _):
        data = file.read(LONGEST_BYTES + 1)
    keys = UniqueKeys()
    try:
        value = decode_json(data, object_pairs_hook=keys)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            raise DataError(
                "JSON objects over several lines: write one record a line (jq -c . FILE does)", path
            ) from error
        return None
    return (value, _repeated(keys)) if isinstance(value, dict) else None


def _is_json(line: bytes) -> bool:
    try:
        decode_json(line)
    except ValueError:
        return False
    return True


def _json_array(file: BinaryIO, position: Callable[[], int], path: Path, section: RecordsSection) -> Iterator[Document]:
    reader = RecordReader(section)
    try:
        for number, element in enumerate(_elements(file, path), 1):
            where = f"{path}, record {number}"
            yield reader.document(partial(_unambiguous, *element, where), where, position())
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text ({error.reason})", path) from error
    except TooDeepError as error:
        raise DataError(f"not a JSON array of records ({error})", path) from None


def _elements(file: BinaryIO, path: Path) -> Iterator[tuple[object, str]]:
    """Yield (element, message about a repeated key) of a JSON array; the message is empty if no key is repeated."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    keys = UniqueKeys()
    scan = json.JSONDecoder(object_pairs_hook=keys).raw_decode
    text, at, ended, number = "", 0, False, 0
    while True:
        while at < len(text) and (text[at].isspace() or text[at] == ("," if number else "[")):
            number += text[at] == "["
            at += 1
        try:
            if at < len(text) and text[at] == "]":
                if not text[at + 1 :].strip() and not file.read(_BLOCK_CHARACTERS).strip():
                    return
                raise DataError("something follows the array of records", path)
            keys.repeated = None
            element, at = scan(text, at)
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated string") or error.pos >= len(text) - _NEAR_THE_END
            if ended or not cut:
                raise DataError(f"not a JSON array of records ({error.msg} in record {number})", path) from error
            if len(text) - at > LONGEST_RECORD:
                raise _too_long(path) from None
            block = file.read(max(_BLOCK_CHARACTERS, len(text) - at))  # doubles the text: all of it is scanned again
            text, at, ended = text[at:] + decode(block, final=not block), 0, not block
            check_json_depth(f"[{text}" if number else text)  # after the first read, `text` lacks the opening bracket
        except UnicodeDecodeError:
            raise
        except ValueError as error:  # such as an integer of thousands of digits
            raise DataError(f"not a JSON array of records ({error})", path) from error
        else:
            number += 1
            yield element, _repeated(keys)


def _csv(path: Path, section: RecordsSection) -> Iterator[Document]:
    csv.field_size_limit(LONGEST_RECORD)
    with opened(path) as (file, position):
        decoded = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = csv.reader(_bounded(decoded, path), strict=True)
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


def _parquet(path: Path, section: RecordsSection) -> Iterator[Document]:
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


RECORDS: dict[str, Callable[[Path, RecordsSection], Iterator[Document]]] = {
    ".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet,
}  # fmt: skip
