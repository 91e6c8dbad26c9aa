"""Detect the format of records by the names of their fields: the fields of other trainers are recognised, too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aliquot.config.data_section import RecordsSection
from aliquot.core.errors import DataError
from aliquot.data.chat_messages import is_message
from aliquot.data.documents import MISSING_FIELD, NO_RECORD, BadRecordError, Document, Kind, left_out
from aliquot.data.formats import CONTEXT_FIELDS, Format
from aliquot.data.record_answers import CHATS, INPUTS, INSTRUCTION

# The fields of a prompt that all objectives recognise, in the order of preference, each with the fields of its answer.
_PROMPTS = {
    "prompt": ("completion",),
    INSTRUCTION: ("output", "response"),  # Alpaca, Dolly
    "question": ("answer", "response"),
    "query": ("response",),
}
_PAIRS = (("chosen", "rejected"), ("response", "rejected_response"), ("messages", "rejected_response"))
_LABELS = ("label", "kto_tag")
UNREAD_COLUMNS = "a table with columns of text that are not read (list them in data.unused_fields if that is right)"


def format_of(section: RecordsSection, names: Iterable[str], where: str | Path) -> Format:
    """Return the format that `section` names, else the first one whose fields are all among `names`.

    A preference objective names the fields of TRL; instead of them, those of other trainers are read, too.
    Raises UserError if a field is missing, or if no format fits.
    """
    present = list(names)
    is_trl = section.label is not None and (section.prompt, section.completion) == ("prompt", "completion")
    if section.text_field is not None:
        forms = [Format("text", (section.text_field,))]
    elif section.messages is not None:
        forms = [Format("messages", (section.messages,), CONTEXT_FIELDS)]
    elif section.chosen is not None and section.rejected is not None:
        prompts = (*_PROMPTS, *CHATS) if section.prompt is None else (section.prompt,)
        pair = (section.chosen, section.rejected)
        forms = [_answer_format("preference", prompts, pair) for pair in (_PAIRS if pair == _PAIRS[0] else (pair,))]
    elif section.prompt is not None and section.completion is not None and not is_trl:
        forms = [_answer_format("prompt", (section.prompt,), (section.completion,))]
    else:
        forms = _recognised_formats(present)
    if section.label is not None:
        labels = _LABELS if section.label == _LABELS[0] else (section.label,)
        rated = [replace(form, kind="rated") for form in forms if form.kind != "text"]
        forms = [replace(form, fields=(*form.fields, label)) for form in rated for label in labels]
    form = next((form for form in forms if form.missing(present) is None), None)
    is_detected = section.label is None and section.chosen is None and len(forms) > 1
    if form is None and is_detected:
        raise _unknown_format(present, where)
    form = form or max(forms, key=lambda form: len(set(form.fields) & set(present)))
    form.check(present, where)
    elsewhere = tuple(other.fields for other in forms if other is not form) if is_detected else ()
    optional, unused = _present(present, *form.optional), tuple(section.unused_fields)
    return replace(form, optional=optional, unused=unused, elsewhere=elsewhere)


def _recognised_formats(names: Sequence[str]) -> list[Format]:
    """Return the formats of single answers, and the format of texts, in the order of preference."""
    forms = [Format(chat, (chat,), CONTEXT_FIELDS) for chat in CHATS]
    forms += [
        _answer_format(
            "instruction" if prompt == INSTRUCTION else "prompt", (prompt,), (_present(names, *answers) or answers)[:1]
        )
        for prompt, answers in _PROMPTS.items()
    ]
    forms.insert(-2, Format("text", ("text",)))  # a text precedes the fields that are recognised last
    return forms


def _answer_format(kind: Kind, prompts: tuple[str, ...], answers: tuple[str, ...]) -> Format:
    """Return the format of records with one answer or two, whose prompt is in one of the fields `prompts`."""
    prompts = tuple(name for name in prompts if name not in answers)
    optional = (*INPUTS, *CONTEXT_FIELDS, "history") if INSTRUCTION in prompts else CONTEXT_FIELDS
    if kind == "preference":
        return Format(kind, answers, (*prompts, *optional), prompts, answers)
    return Format(kind, (*prompts, *answers), optional, prompts, answers)


def _unknown_format(names: Sequence[str], where: str | Path) -> DataError:
    if any(set(pair) <= set(names) for pair in _PAIRS):
        return DataError("the records are pairs of answers: set train.objective, for example to dpo", where)
    message = "no fields: an empty file, or no header"
    if names:
        message = (
            f"no known field; there are {', '.join(map(str, names))}: set data.text_field (all of it is"
            " learned), data.messages (a chat), or data.prompt and data.completion"
        )
    return BadRecordError(message, where, MISSING_FIELD)


def _present(names: Iterable[str], *candidates: str) -> tuple[str, ...]:
    present = set(names)
    return tuple(name for name in candidates if name in present)


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
