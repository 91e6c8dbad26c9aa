"""What one document is, and how a file or a record becomes documents. Everything streams."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from aliquot.errors import DataError

Unit = Literal["file", "line", "block", "field"]


_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}


class Document(NamedTuple):
    """One document. `text` is a JSON list of messages where `chat`. `done_bytes`: how far its source had been read."""

    text: str
    chat: bool
    done_bytes: int


def text_documents(path: Path, unit: Unit) -> Iterator[Document]:
    """Documents of a UTF-8 text file. Line ends are read as newlines; a byte order mark is dropped.

    Raises UserError naming the file, and the line where there is one, at bytes that are not UTF-8.
    """
    if unit == "file":
        data = path.read_bytes()
        text = _decode(data, str(path)).removeprefix("\ufeff")
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        yield Document(text, False, len(data))
        return
    block: list[str] = []
    done_bytes = 0
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            done_bytes += len(data)
            line = _decode(data, f"{path}:{number}").rstrip("\r\n")
            if number == 1:
                line = line.removeprefix("\ufeff")
            if unit == "line":
                yield Document(line, False, done_bytes)
            elif line and not line.isspace():
                block.append(line)
            elif block:
                yield Document("\n".join(block), False, done_bytes)
                block = []
    if block:
        yield Document("\n".join(block), False, done_bytes)


def jsonl_documents(path: Path, field: str) -> Iterator[Document]:
    """One document a line, in `field`. Raises UserError with file:line at a bad line or an absent field."""
    done_bytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            done_bytes += len(line)
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
            except UnicodeDecodeError as error:
                raise _no_text(line, error, where) from error
            except (ValueError, RecursionError) as error:  # the second: endless nesting
                raise DataError(f"not a JSON record ({error}); write one record a line", where) from error
            if not isinstance(record, dict):
                raise DataError(f"a record must be a JSON object, not {type(record).__name__}", where)
            check_field(field, record, where)
            text, chat = value_text(record[field], field, where)
            if b"\\u" in line:
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise DataError(
                        f"field {field!r} holds half of a surrogate pair, which is no text", where
                    ) from error
            yield Document(text, chat, done_bytes)


def parquet_documents(path: Path, field: str) -> Iterator[Document]:
    """One document a row, in column `field`. Raises UserError at an absent column or a damaged file."""
    import pyarrow
    import pyarrow.parquet

    size_bytes = path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_field(field, file.schema_arrow.names, path)
            rows = max(file.metadata.num_rows, 1)
            row = 0
            for batch in file.iter_batches(batch_size=512, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield Document(*value_text(value, field, f"{path}, row {row}"), size_bytes * row // rows)
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable parquet file ({error})", path) from error


def value_text(value: object, field: str, where: str) -> tuple[str, bool]:
    """(text, whether it is a chat) of a record's field: a string, or a list of messages as JSON. None is empty."""
    if value is None:
        return "", False
    if isinstance(value, str):
        return value, False
    if not isinstance(value, list):
        raise DataError(f"field {field!r} holds {type(value).__name__}, not text or a list of messages", where)
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"field {field!r} is a list, but not one of messages with `role` and `content`", where)
        if not isinstance(message.get("content"), str | None):
            raise DataError("a message's `content` must be text", where)
    messages = [{key: part for key, part in message.items() if part is not None} for message in value]
    return (json.dumps(messages, ensure_ascii=False) if messages else ""), True


def check_field(field: str, fields: Iterable[str], where: str | Path) -> None:
    names = list(fields)
    if field not in names:
        raise DataError(f"no field {field!r}; there are {', '.join(map(str, names))}: set data.text_field", where)


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_text(data, error, where) from error


def _no_text(data: bytes, error: UnicodeDecodeError, where: str) -> DataError:
    packed = next((name for start, name in _PACKED.items() if data.startswith(start)), None)
    if packed is not None:
        return DataError(f"a {packed} archive, not text: unpack it first", where)
    return DataError(f"not UTF-8 text ({error.reason} at byte {error.start})", where)
