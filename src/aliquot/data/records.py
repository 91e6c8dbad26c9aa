"""Read records from JSON lines, JSON arrays, CSV and parquet: one document a record. Everything streams."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from aliquot.config.data_section import RecordsSection
from aliquot.core.decode import TooDeepError, check_json_depth, decode_json
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

LONGEST_RECORD = 1 << 26  # bytes or characters, because a record is held as a whole
LONGEST_BYTES = 64 << 20  # of an object over several lines, which is read as a whole
_BLOCK_CHARACTERS = 1 << 20
_ROWS, _BATCH_BYTES = 512, 16 << 20  # of a table that are read at once
_NEAR_THE_END = 16  # characters: the longest JSON value but strings


def record_documents(path: Path, section: RecordsSection) -> Iterator[Document]:
    """Yield one document a record of a .jsonl, .json, .csv or .parquet file, also for blank records.

    A record that cannot be read becomes a blank document with a reason. Raises UserError for a file with a broken
    layout or a missing part, and for a record of another format.
    """
    return RECORDS[suffix_of(path)](path, section)


def _jsonl(path: Path, section: RecordsSection) -> Iterator[Document]:
    with opened(path) as (file, position):
        yield from _json_lines(file, position, path, section)


def _json(path: Path, section: RecordsSection) -> Iterator[Document]:
    """Yield the records of an array, of lines, or the one record of a file over several lines."""
    with opened(path) as (file, _):
        start = file.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip()
    if start.startswith(b"{") and (whole := whole_object(path, start)) is not None:
        record, twice = whole
        yield _document(record, twice, None, section, str(path), path.stat().st_size)[0]
        return
    with opened(path) as (file, position):
        read = _json_array if start.startswith(b"[") else _json_lines
        yield from read(file, position, path, section)


def _json_lines(file: BinaryIO, position: Callable[[], int], path: Path, section: RecordsSection) -> Iterator[Document]:
    form: Format | None = None
    for number, line in enumerate(_bounded(file, path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            text, kind, form = _read(_record_in(line, where), form, section, where)
            text = encodable(text, where) if b"\\u" in line else text
        except BadRecordError as error:
            yield left_out(error, position())
            continue
        yield Document(text, kind, position(), where=where)


def _record_in(line: bytes, where: str) -> Any:
    try:
        # json.loads would accept encoded surrogates in bytes.
        text = line.removeprefix(codecs.BOM_UTF8).decode()
        return decode_json(text, object_pairs_hook=UniqueKeys(refuse=True))
    except UnicodeDecodeError as error:
        raise not_text(error, where) from error
    except TwiceError as error:
        raise BadRecordError(str(error), where, KEY_TWICE) from error
    except json.JSONDecodeError as error:
        if not line.endswith(b"\n") and _is_cut(error, text):
            message = f"the last record is cut off ({error}): a part of the file is missing. Fetch it again"
            raise DataError(message, where) from error
        raise BadRecordError(f"not a JSON record ({error}); write one record a line", where, NO_RECORD) from error
    except ValueError as error:
        raise BadRecordError(f"not a JSON record ({error}); write one record a line", where, NO_RECORD) from error


def _is_cut(error: json.JSONDecodeError, text: str) -> bool:
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip())


def _bounded(file: BinaryIO | io.TextIOWrapper, path: Path) -> Iterator[Any]:
    """Yield the lines of `file`.

    Raises DataError at a line longer than LONGEST_RECORD, which a small archive may hold.
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


def _json_array(file: BinaryIO, position: Callable[[], int], path: Path, section: RecordsSection) -> Iterator[Document]:
    form: Format | None = None
    try:
        for number, (record, twice) in enumerate(_elements(file, path), 1):
            document, form = _document(record, twice, form, section, f"{path}, record {number}", position())
            yield document
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text ({error.reason})", path) from error
    except TooDeepError as error:
        raise DataError(f"not a JSON array of records ({error})", path) from None


def _document(
    record: Any, twice: str, form: Format | None, section: RecordsSection, where: str, done_bytes: int
) -> tuple[Document, Format | None]:
    """Return the document in a record, and the format of further records. `twice` names a repeated key, if any."""
    try:
        if twice:
            raise BadRecordError(twice, where, KEY_TWICE)
        text, kind, form = _read(record, form, section, where)
        return Document(encodable(text, where), kind, done_bytes, where=where), form
    except BadRecordError as error:
        return left_out(error, done_bytes), form


def _elements(file: BinaryIO, path: Path) -> Iterator[tuple[object, str]]:
    """Yield the elements of one JSON array, each with a message about a repeated key, which is empty without one."""
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
            keys.twice = ""
            element, at = scan(text, at)
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated string") or error.pos >= len(text) - _NEAR_THE_END
            if ended or not cut:
                raise DataError(f"not a JSON array of records ({error.msg} in record {number})", path) from error
            if len(text) - at > LONGEST_RECORD:
                raise _too_long(path) from None
            block = file.read(
                max(_BLOCK_CHARACTERS, len(text) - at)
            )  # at least twice as much, because the text is scanned again
            text, at, ended = text[at:] + decode(block, final=not block), 0, not block
            check_json_depth(f"[{text}" if number else text)  # only the first text begins with the bracket of the array
        except UnicodeDecodeError:
            raise
        except ValueError as error:  # such as an integer of thousands of digits
            raise DataError(f"not a JSON array of records ({error})", path) from error
        else:
            number += 1
            yield element, keys.twice


def _csv(path: Path, section: RecordsSection) -> Iterator[Document]:
    csv.field_size_limit(LONGEST_RECORD)
    with opened(path) as (file, position):
        decoded = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = csv.reader(_bounded(decoded, path), strict=True)
        try:
            names = next(rows, [])
            if twice := stands_twice([name for name in names if name], "column"):
                raise DataError(twice, path)
            form = format_of(section, names, path)
            for row in rows:
                if not row:
                    continue
                where = f"{path}:{rows.line_num}"
                try:
                    text, kind = form.read(_record_of_row(names, row, where), where)
                    document = Document(encodable(text, where), kind, position(), where=where)
                except BadRecordError as error:
                    document = left_out(error, position())
                yield document
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
            if twice := stands_twice(file.schema_arrow.names, "column"):
                raise DataError(twice, path)
            form = format_of(section, file.schema_arrow.names, path)
            rows = max(file.metadata.num_rows, 1)
            row = 0
            for record in _rows(file, form.columns(file.schema_arrow.names)):
                row += 1
                yield row_document(form, record, f"{path}, row {row}", size_bytes * row // rows)
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable parquet file ({error})", path) from error
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text ({error.reason})", f"{path}, after row {row}") from error


def _rows(file: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, as many at once as fit into memory by the unpacked size of their group."""
    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        at_once = rows_at_once(group.total_byte_size, group.num_rows)
        for batch in file.iter_batches(batch_size=at_once, row_groups=[index], columns=columns):
            yield from batch.to_pylist()


def rows_at_once(size_bytes: int, rows: int) -> int:
    """Return how many rows of a table to read at once: memory holds them twice, as a table and as Python objects."""
    return max(1, min(_ROWS, _BATCH_BYTES * rows // max(size_bytes, 1)))


def row_document(form: Format, row: dict[str, Any], where: str, done_bytes: int) -> Document:
    """The document in a row of a table; a blank one with a reason where the row cannot be read."""
    try:
        text, kind = form.read(as_written(row), where)
        return Document(encodable(text, where), kind, done_bytes, where=where)
    except BadRecordError as error:
        return left_out(error, done_bytes)


RECORDS: dict[str, Callable[[Path, RecordsSection], Iterator[Document]]] = {
    ".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet,
}  # fmt: skip


def as_written(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row without nulls in lists: a table gives each structure the keys of all structures in a column."""

    def without_nulls(value: Any) -> Any:
        if isinstance(value, list):
            return [without_nulls(item) for item in value]
        if isinstance(value, dict):
            return {key: without_nulls(item) for key, item in value.items() if item is not None}
        return value

    return {key: without_nulls(value) for key, value in record.items()}


def _read(record: Any, form: Format | None, section: RecordsSection, where: str) -> tuple[str, Kind, Format]:
    """Return (text, kind, format) of a record; its format is that of earlier records, or follows from its fields."""
    if not isinstance(record, dict):
        raise BadRecordError(f"a record must be a JSON object, not {type(record).__name__}", where, NO_RECORD)
    form = form or _format_of(section, record, where)
    form.check(record, where)
    return *form.read(record, where), form


def _format_of(section: RecordsSection, record: dict[str, Any], where: str) -> Format:
    """Return the format of a record. Raises as `format_of`, with advice for an object that holds a list of records."""
    try:
        return format_of(section, record, where)
    except BadRecordError as error:
        lists = {key: value for key, value in record.items() if isinstance(value, list) and value}
        key = next((key for key, value in lists.items() if all(isinstance(item, dict) for item in value)), None)
        if key is None:
            raise
        raise BadRecordError(
            f"one JSON object with the keys {', '.join(record)}, of which {key!r} holds a list of {len(record[key])}:"
            f" if those are the records, write that list alone (jq .{key} FILE > RECORDS.json)",
            where,
            error.reason,
        ) from error


def encodable(text: str, where: str) -> str:
    """Return `text` if UTF-8 can hold it. Raises BadRecordError for half of a surrogate pair, which JSON may escape."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = "a field holds half of a surrogate pair, which is no text"
        raise BadRecordError(message, where, HALF_CHARACTER) from error
    return text


def whole_object(path: Path, start: bytes) -> tuple[dict[str, Any], str] | None:
    """Return (the only JSON object of a file, over several lines, a message about a repeated key).

    None if the first line is a record, or if the file is no JSON object.

    Raises DataError for several objects over several lines each.
    """
    line, ended, _ = start.partition(b"\n")
    if not ended or _is_json(line):
        return None
    with opened(path) as (file, _):
        data = file.read(LONGEST_BYTES + 1)
    keys = UniqueKeys()
    try:
        value = decode_json(data, object_pairs_hook=keys)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise DataError(
                "JSON objects over several lines: write one record a line (jq -c . FILE does)", path
            ) from error
        return None
    except ValueError:
        return None
    return (value, keys.twice) if isinstance(value, dict) else None


def _is_json(line: bytes) -> bool:
    try:
        decode_json(line)
    except ValueError:
        return False
    return True


class TwiceError(Exception):
    """A key stands twice in one object, of which Python would keep the last value."""


class UniqueKeys:
    """Make the objects of a JSON text; remember a repeated key in `twice`, or raise TwiceError if `refuse` is true."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse, self.twice = refuse, ""

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            self.twice = stands_twice([key for key, _ in pairs], "key")
            if self.refuse:
                raise TwiceError(self.twice)
        return record


def stands_twice(names: list[str], what: str) -> str:
    """Return a message about a repeated name; empty if no name stands twice."""
    name, times = Counter(names).most_common(1)[0] if names else ("", 1)
    return f"the {what} {name!r} stands {times} times: which one is meant? Rename or remove the others" * (times > 1)
