"""Stream the records of JSON lines, JSON arrays and single JSON objects, and turn each record into a document."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from aliquot.config.data_section import RecordsSection
from aliquot.core.decode import TooDeepError, UniqueKeys, check_json_depth, decode_json
from aliquot.core.errors import DataError
from aliquot.data.data_files import LONGEST_RECORD, lines_within_limit, not_text, opened, too_long
from aliquot.data.documents import NO_RECORD, BadRecordError, Document, repeated_name
from aliquot.data.format_detection import RecordReader

LONGEST_BYTES = 64 << 20  # of a file with one JSON object over several lines, which is read as a whole
_BLOCK_CHARACTERS = 1 << 20
_NEAR_THE_END = 16  # characters; an error this near the end may come from a value that is cut off


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
