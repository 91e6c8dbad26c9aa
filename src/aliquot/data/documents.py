"""The document type, the reasons for which records are left out, and a streaming reader of plain text files."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from aliquot.core.errors import DataError
from aliquot.data.data_files import not_text, opened

Unit = Literal["file", "line", "block", "field"]
Kind = Literal["text", "messages", "conversations", "prompt", "instruction", "preference", "rated"]
PART_BYTES = 16 << 20  # a longer document is yielded in parts of this size
NO_TEXT = "no text has any. Leave this file out, or remove them (tr -d '\\0')"
HOLDS_NUL = "a text with NUL characters, left out"
NO_RECORD = "a line or an element that is no JSON record, left out"
MISSING_FIELD = "a record without a field that the format needs, left out"
WRONG_TYPE = "a record with a field of the wrong type, left out"
UNKNOWN_FIELD = "a field in data.unused_fields that no record has"
UNKNOWN_ROLE = "a record with a role that no chat template knows, left out"
UNUSABLE_FLAG = "a record with a loss flag that cannot be obeyed, left out"
UNCLEAR_PROMPT = "a pair whose prompt is in an unknown field, left out"


class BadRecordError(DataError, id="data"):
    """Raised for a record that cannot be read. A run counts the record by `reason` and continues with the next one."""

    def __init__(self, message: str, where: str | Path | None = None, reason: str = WRONG_TYPE) -> None:
        super().__init__(message, where)
        self.reason = reason


class Document(NamedTuple):
    """A document, or a part of a long one. `text` is plain text, a record as JSON (see record_answers.py), or blank."""

    text: str
    kind: Kind
    done_bytes: int  # bytes of the source that have been read so far, for progress
    ended: bool = True  # False: the next document continues this one
    reason: str | None = None  # why a blank document is left out
    notes: tuple[tuple[str, str], ...] = ()  # (remark on a document that is used, details), which are counted
    where: str = ""  # the record's file and line, or row; for an unreadable record, its error message
    fields: Collection[str] = ()  # names of the fields of a readable record, or of the columns of its table

    @property
    def blank(self) -> bool:
        return self.ended and (not self.text or self.text.isspace())

    @property
    def is_bad(self) -> bool:
        """Whether this document replaces a record that cannot be read."""
        return self.reason is not None and self.where != ""


def left_out(error: BadRecordError, done_bytes: int) -> Document:
    """Return the blank document that replaces a record that cannot be read."""
    return Document("", "text", done_bytes, reason=error.reason, where=str(error))


def repeated_name(what: str, name: str, times: int) -> str:
    """Return the error message for a key or a column (`what`) whose name stands several times."""
    return f"the {what} {name!r} stands {times} times: which one is meant? Rename or remove the others"


def refuse_bad_alone(documents: Iterator[Document], at_least: int = 1) -> Iterator[Document]:
    """Yield `documents`. At the end, raise the first bad record's error if no document is usable.

    Fewer than `at_least` bad records raise no error.
    """
    first, bad, usable = "", 0, False
    for document in documents:
        bad += document.is_bad
        usable = usable or not document.blank
        first = first or (document.where if document.is_bad else "")
        yield document
    if bad >= at_least and not usable:
        raise DataError(first)


def text_documents(path: Path, unit: Unit) -> Iterator[Document]:
    """Yield the documents of a UTF-8 text file. Line ends become newlines; a byte order mark is dropped."""
    with opened(path) as (file, position):
        yield from _parts(file, position, path) if unit == "file" else _lines(file, position, path, unit)


def _parts(file: BinaryIO, position: Callable[[], int], path: Path) -> Iterator[Document]:
    """Yield the whole file as one document, in parts if it is long."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with_newlines = io.IncrementalNewlineDecoder(decoder, translate=True)
    read_bytes, text = 0, ""
    while True:
        block = file.read(PART_BYTES)
        waiting = decoder.getstate()[0]
        try:
            decoded = with_newlines.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_text(error, str(path), read_bytes - len(waiting)) from error
        if (at := block.find(b"\0")) >= 0:
            nul = BadRecordError(f"a NUL byte at byte {read_bytes + at}: {NO_TEXT}", path, HOLDS_NUL)
            if read_bytes or len(block) == PART_BYTES:  # an earlier part may already have been yielded
                raise nul
            yield left_out(nul, position())
            return
        if not block:
            yield Document(text + decoded, "text", position())
            return
        if text:
            yield Document(text, "text", position(), ended=False)
        read_bytes, text = read_bytes + len(block), decoded


def _lines(file: BinaryIO, position: Callable[[], int], path: Path, unit: Unit) -> Iterator[Document]:
    """Yield each line, or each block of lines between blank lines, as a document; in parts if it is long."""
    waiting: list[str] = []  # lines of the document that have not been yielded
    characters, begun = 0, False  # begun: a part of the document has been yielded
    number = 0
    line_is_blank = True  # so far; a long line is read in parts
    nul: int | None = None  # the line with the document's first NUL character

    def documents(ended: bool) -> Iterator[Document]:
        if nul is None:
            yield Document("".join(waiting), "text", position(), ended)
            return
        error = BadRecordError(f"a NUL byte: {NO_TEXT}", f"{path}:{nul}", HOLDS_NUL)
        if begun or not ended:
            raise error
        yield left_out(error, position())

    for text, first, last in _parts_of_lines(file, path):
        number += first
        line_is_blank = (first or line_is_blank) and (not text or text.isspace())
        nul = number if nul is None and "\0" in text else nul
        if not (last and line_is_blank):
            waiting.append(f"\n{text}" if first and (begun or waiting) else text)
            characters += len(text)
            ended = unit == "line" and last
            if not ended and characters < PART_BYTES:
                continue
        elif not (begun or waiting):
            continue
        else:
            ended = True
        yield from documents(ended)
        waiting, characters, begun, nul = [], 0, not ended, None
    if begun or waiting:
        yield from documents(ended=True)


def _parts_of_lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, bool, bool]]:
    """Yield (text, whether the text begins a line, whether it ends a line); each text has at most PART_BYTES."""
    decoder, number, first = codecs.getincrementaldecoder("utf-8")(), 1, True
    while data := file.readline(PART_BYTES):
        last = data.endswith(b"\n") or len(data) < PART_BYTES
        try:
            text = data.decode("utf-8") if first and last else decoder.decode(data, final=last)
        except UnicodeDecodeError as error:
            raise not_text(error, f"{path}:{number}") from error
        if number == 1 and first:
            text = text.removeprefix("\ufeff")
        yield text.rstrip("\r\n") if last else text, first, last
        number, first = number + last, last
