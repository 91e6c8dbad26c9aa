"""Detect the format of records by the names of their fields: text, chat, instruction, prompt, pair or rating.

record_answers.py reads the fields into documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aliquot.config.data_section import RecordsSection
from aliquot.core.decode import TooDeepError, check_depth
from aliquot.core.errors import DataError
from aliquot.data.chat_messages import LOSS_FLAGS, is_excluded, text_parts
from aliquot.data.documents import (
    EXCLUDED,
    HALF_CHARACTER,
    MISSING_FIELD,
    NO_RECORD,
    TOO_DEEP,
    BadRecordError,
    Document,
    Kind,
    left_out,
)
from aliquot.data.record_answers import (
    INPUTS,
    read_chat,
    read_completion,
    read_instruction,
    read_pair,
    read_rated,
    read_text,
)

TITLES: dict[str, tuple[str, str]] = {  # singular, plural
    "text": ("text", "texts"),
    "messages": ("chat (messages)", "chats (messages)"),
    "conversations": ("chat (ShareGPT)", "chats (ShareGPT)"),
    "prompt": ("prompt with completion", "prompts with completions"),
    "instruction": ("instruction (Alpaca)", "instructions (Alpaca)"),
    "preference": ("pair of answers", "pairs of answers"),
    "rated": ("rated answer", "rated answers"),
}
_OUTPUTS = ("output", "response")  # field names of the output in Alpaca's and in Dolly's format
# Optional fields of all formats with answers.
_CONTEXT_FIELDS = ("system", "tools", "chat_template_kwargs", *LOSS_FLAGS)


@dataclass(frozen=True)
class Format:
    """The format of the records of a source: the kind of document, and the fields that hold its text."""

    kind: Kind
    fields: tuple[str, ...]  # fields that a record must have
    optional: tuple[str, ...] = ()  # fields that a record may have
    elsewhere: tuple[tuple[str, ...], ...] = field(default=(), repr=False)  # required fields of each other format

    def check(self, names: Iterable[str], where: str | Path) -> None:
        """Raise UserError if a required field is missing from `names`, the fields of a record."""
        present = list(names)
        missing = next((name for name in self.fields if name not in present), None)
        foreign = next((fields for fields in self.elsewhere if set(fields) <= set(present)), None)
        if missing is not None and foreign is not None:
            raise DataError(
                f"no field {missing!r}, which the first record has, but {foreign[0]!r}: give records of different"
                " formats sources of their own, data.sources",
                where,
            )
        if missing is not None:
            present_names = ", ".join(map(str, present))
            raise BadRecordError(f"no field {missing!r}; there are {present_names}", where, MISSING_FIELD)

    def read(self, record: Mapping[str, Any], where: str) -> tuple[str, Kind]:
        """Return (document, kind) of a record; the document is "" if the record is empty.

        Raises BadRecordError for a record that cannot be read, and DataError for a record of another format.
        """
        try:
            check_depth(record)
        except TooDeepError as error:
            raise BadRecordError(f"{error} in this record", where, TOO_DEEP) from None
        if self.elsewhere and all(record.get(name) in (None, "") for name in self.fields):
            foreign = next((fields for fields in self.elsewhere if all(record.get(name) for name in fields)), None)
            if foreign is not None:
                raise DataError(
                    f"{self.fields[0]!r} is null here, but {foreign[0]!r} is not: give records of different formats"
                    " sources of their own, data.sources",
                    where,
                )
        if self.kind == "text":
            value = record[self.fields[0]]
            if isinstance(value, list):
                return read_chat(value, {}, self.fields[0], where), "messages"
            return read_text(value, self.fields[0], where, "text or a list of messages"), "text"
        if is_excluded(record, where):
            raise BadRecordError("a loss flag of the record excludes it", where, EXCLUDED)
        if self.kind in ("messages", "conversations"):
            return read_chat(record[self.fields[0]], record, self.fields[0], where), self.kind
        if self.kind == "preference":
            return read_pair(self.fields, self.optional[0], record, where), self.kind
        if self.kind == "rated":
            return read_rated(self.fields, record, where), self.kind
        if self.kind == "prompt":
            return read_completion(self.fields[0], self.fields[1], record, where), self.kind
        return read_instruction(self.fields[1], record, where), self.kind

    def columns(self, names: Iterable[str]) -> list[str]:
        """Return those columns of a table (`names`) that `read` uses."""
        fields = {*self.fields, *self.optional, *(name for fields in self.elsewhere for name in fields)}
        return [name for name in names if name in fields]


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
        form = self.form or _format_of_record(self.section, record, where)
        form.check(record, where)
        text_and_kind = form.read(record, where)
        self.form = form
        return text_and_kind


def _format_of_record(section: RecordsSection, record: dict[str, Any], where: str) -> Format:
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


def words(text: str, kind: Kind) -> list[str]:
    """Return the texts in a document that `Format.read` returned: the contents of messages, or the fields."""
    if kind == "text" or not text:
        return [text]
    record = json.loads(text)
    if kind == "preference":
        return [part for answer in ("chosen", "rejected") for part in words(json.dumps(record[answer]), "prompt")]
    if "messages" in record:
        return [part for message in record["messages"] for part in text_parts(message)]
    return [part for part in record.values() if isinstance(part, str)]


def format_of(section: RecordsSection, names: Iterable[str], where: str | Path) -> Format:
    """Return the record format that `section` configures, else detect it by the names of the fields (`names`).

    Raises UserError if a configured field is missing, or if no format fits.
    """
    present = list(names)
    if section.text_field is not None:
        named = Format("text", (section.text_field,))
    elif section.messages is not None:
        named = Format("messages", (section.messages,), _present(present, *_CONTEXT_FIELDS))
    elif section.chosen is not None and section.rejected is not None:
        prompt = section.prompt or "prompt"
        answers = (section.chosen, section.rejected)
        named = Format("preference", answers, (prompt, *_present(present, *_CONTEXT_FIELDS)))
    elif section.prompt is not None and section.completion is not None and section.label is not None:
        fields = (section.prompt, section.completion, section.label)
        named = Format("rated", fields, _present(present, *_CONTEXT_FIELDS))
    elif section.prompt is not None and section.completion is not None:
        named = Format("prompt", (section.prompt, section.completion), _present(present, *_CONTEXT_FIELDS))
    else:
        return _detected_format(present, where)
    try:
        named.check(present, where)
    except BadRecordError as error:
        message = f"{error}: set data.text_field, or the keys of another format"
        raise BadRecordError(message, reason=error.reason) from None
    return named


def _detected_format(names: list[str], where: str | Path) -> Format:
    outputs = _present(names, *_OUTPUTS)
    candidates: list[tuple[Kind, tuple[str, ...], tuple[str, ...]]] = [
        ("messages", ("messages",), _CONTEXT_FIELDS),
        ("conversations", ("conversations",), _CONTEXT_FIELDS),
        ("prompt", ("prompt", "completion"), _CONTEXT_FIELDS),
        ("instruction", ("instruction", *(outputs[:1] or _OUTPUTS)), (*INPUTS, *_CONTEXT_FIELDS, "history")),
        ("text", ("text",), ()),
    ]
    matching = [candidate for candidate in candidates if set(candidate[1]) <= set(names)]
    if not matching and not names:
        raise BadRecordError("no fields: an empty file, or no header", where, MISSING_FIELD)
    if not matching and {"chosen", "rejected"} <= set(names):
        raise DataError("the records are pairs of answers: set train.objective, for example to dpo", where)
    if not matching:
        raise BadRecordError(
            f"no known field; there are {', '.join(map(str, names))}: set data.text_field (all of it is"
            " learned), data.messages (a chat), or data.prompt and data.completion",
            where,
            MISSING_FIELD,
        )
    kind, fields, optional = matching[0]
    return Format(
        kind,
        fields,
        _present(names, *optional),
        tuple(other_fields for _, other_fields, _ in candidates if other_fields != fields),
    )


def _present(names: Iterable[str], *candidates: str) -> tuple[str, ...]:
    present = set(names)
    return tuple(name for name in candidates if name in present)
