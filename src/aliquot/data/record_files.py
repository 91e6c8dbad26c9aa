"""Stream the records of JSON lines, JSON arrays, JSON objects and tables, and turn each record into a document."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from aliquot.config.data_section import RecordsSection
from aliquot.core.decode import TooDeepError, UniqueKeys, check_json_depth, decode_json, without_nulls
from aliquot.core.errors import DataError
from aliquot.data.chat_messages import is_message
from aliquot.data.data_files import (
    COMPRESSED,
    LONGEST_RECORD,
    lines_within_limit,
    not_text,
    opened,
    refuse_pointer,
    too_long,
)
from aliquot.data.documents import HOLDS_NUL, NO_RECORD, NO_TEXT, BadRecordError, Document, left_out, repeated_name
from aliquot.data.formats import Format, format_of
from aliquot.data.table_files import OpenTable, RecordTable, in_table_process

UNREAD_COLUMNS = "a table with columns of text that are not read (list them in data.unused_fields if that is right)"
LONGEST_BYTES = 64 << 20  # of a file with one JSON object over several lines, which is read as a whole
_BLOCK_CHARACTERS = 1 << 20
_NEAR_THE_END = 16  # characters; an error this near the end may come from a value that is cut off


@dataclass
class RecordReader:
    """Turns the records of a file or table into documents. The first readable record decides the format of all."""

    section: RecordsSection
    form: Format | None = None
    columns: Collection[str] = ()  # all columns of a table, of which a record has only those that are read
    unread_columns: Sequence[str] = ()  # columns of text, of a table, that are not part of the records

    def document(self, record: Callable[[], object], where: str, done_bytes: int) -> Document:
        """Return the document of a record; if the record cannot be read, a blank document with the reason."""
        try:
            document = self._read(record(), where)
            document.text.encode()  # raises an error if JSON escapes half of a surrogate pair
        except BadRecordError as error:
            return left_out(error, done_bytes)
        except UnicodeEncodeError:
            message = "a field holds half of a surrogate pair, which is no text"
            return left_out(
                BadRecordError(message, where, "a record with half of a surrogate pair, left out"), done_bytes
            )
        notes = document.notes
        if self.unread_columns and not document.blank:
            notes += ((UNREAD_COLUMNS, ", ".join(self.unread_columns)),)
            self.unread_columns = ()
        return document._replace(done_bytes=done_bytes, notes=notes, fields=self.columns or document.fields)

    def _read(self, record: object, where: str) -> Document:
        if not isinstance(record, dict):
            raise BadRecordError(f"a record must be a JSON object, not {type(record).__name__}", where, NO_RECORD)
        form = self.form or _format_of_record(self.section, record, where)
        form.check(record, where)
        document = form.read(record, where)
        self.form = form
        return document


def _format_of_record(section: RecordsSection, record: dict[str, Any], where: str) -> Format:
    """Return the format of a record. Raises the errors of `format_of`.

    For an object that holds a list of records, the error says how to extract the list.
    """
    try:
        return format_of(section, record, where)
    except BadRecordError as error:
        lists = {key: value for key, value in record.items() if isinstance(value, list) and value}
        record_lists = (
            key for key in lists if all(isinstance(item, dict) and not is_message(item) for item in lists[key])
        )
        key = next(record_lists, None)
        if key is None:
            raise
        raise BadRecordError(
            f"one JSON object with the keys {', '.join(record)}, of which {key!r} holds a list of {len(record[key])}:"
            f" if those are the records, write that list alone (jq .{key} FILE > RECORDS.json)",
            where,
            error.reason,
        ) from error


def jsonl_documents(path: Path, section: RecordsSection) -> Iterator[Document]:
    """Yield the document of each line of a JSON lines file."""
    with opened(path) as (file, position):
        yield from _json_lines(file, position, path, section)


def json_documents(path: Path, section: RecordsSection) -> Iterator[Document]:
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
    for number, line in enumerate(lines_within_limit(file, path), 1):
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
        is_cut = isinstance(error, json.JSONDecodeError) and (
            error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip())
        )
        if is_cut and not line.endswith(b"\n"):
            raise DataError(
                f"the last record is cut off ({error}): a part of the file is missing. Fetch it again", where
            ) from error
        raise BadRecordError(f"not a JSON record ({error}); write one record a line", where, NO_RECORD) from error
    return _unambiguous(record, keys, where)


def _unambiguous(record: object, keys: UniqueKeys, where: str) -> object:
    """Return the record. Raises BadRecordError if `keys` has recorded a repeated key."""
    if keys.repeated is not None:
        raise BadRecordError(
            repeated_name("key", *keys.repeated), where, "a record in which a key stands twice, left out"
        )
    return record


def _whole_object(path: Path, start: bytes) -> tuple[object, UniqueKeys] | None:
    """Return (object, its keys) of a file that is one JSON object over several lines.

    Returns None if the first line is a record, or if the file is not a JSON object. Raises DataError if the file holds
    several objects.
    """
    line, ended, _ = start.partition(b"\n")
    if not ended:
        return None
    with suppress(ValueError):
        decode_json(line)
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
    return (value, keys) if isinstance(value, dict) else None


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


def _elements(file: BinaryIO, path: Path) -> Iterator[tuple[object, UniqueKeys]]:
    """Yield (element, its keys) of a JSON array; the keys are those of the last element."""
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
                raise too_long(path) from None
            block = file.read(max(_BLOCK_CHARACTERS, len(text) - at))  # doubles the text: all of it is scanned again
            text, at, ended = text[at:] + decode(block, final=not block), 0, not block
            check_json_depth(f"[{text}" if number else text)  # after the first read, `text` lacks the opening bracket
        except ValueError as error:  # such as an integer of thousands of digits
            raise DataError(f"not a JSON array of records ({error})", path) from error
        else:
            number += 1
            yield element, keys


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
