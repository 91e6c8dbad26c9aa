"""Detect the format of records by the names of their fields: text, chat, instruction, prompt, pair or rating.

record_answers.py reads the fields into documents; record_files.py reads the records.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from aliquot.config.data_section import RecordsSection
from aliquot.core.decode import TooDeepError, check_depth
from aliquot.core.errors import DataError
from aliquot.data.chat_messages import LOSS_FLAGS, is_excluded, is_message, read_text, text_parts, truth
from aliquot.data.documents import (
    MISSING_FIELD,
    UNCLEAR_PROMPT,
    UNKNOWN_FIELD,
    BadRecordError,
    Document,
    Kind,
)
from aliquot.data.record_answers import CHATS, INPUTS, INSTRUCTION, read_answers, read_chat

TITLES: dict[str, tuple[str, str]] = {  # singular, plural
    "text": ("text", "texts"),
    "messages": ("chat (messages)", "chats (messages)"),
    "conversations": ("chat (ShareGPT)", "chats (ShareGPT)"),
    "prompt": ("prompt with completion", "prompts with completions"),
    "instruction": ("instruction (Alpaca)", "instructions (Alpaca)"),
    "preference": ("pair of answers", "pairs of answers"),
    "rated": ("rated answer", "rated answers"),
}
# The fields of a prompt that all objectives recognise, in the order of preference, each with the fields of its answer.
_PROMPTS = {
    "prompt": ("completion",),
    INSTRUCTION: ("output", "response"),  # Alpaca, Dolly
    "question": ("answer", "response"),
    "query": ("response",),
}
_PAIRS = (("chosen", "rejected"), ("response", "rejected_response"), ("messages", "rejected_response"))
_LABELS = ("label", "kto_tag")
# Optional fields of all formats with answers.
_CONTEXT_FIELDS = ("system", "tools", "chat_template_kwargs", *LOSS_FLAGS)
_KEYS: Mapping[str, str] = {  # the keys that name the fields of a format
    "text": "data.text_field",
    "messages": "data.messages",
    "prompt": "data.prompt and data.completion",
    "preference": "data.chosen, data.rejected and, for the prompt, data.prompt",
    "rated": "data.prompt, data.completion and data.label",
}
UNREAD = "a record with text in fields that are not read (list them in data.unused_fields if that is right)"
IMPLICIT_PROMPT = "a pair without a prompt, for which the common beginning of both answers is taken"


@dataclass(frozen=True)
class Format:
    """The format of the records of a source: the kind of document, and the fields that hold its text."""

    kind: Kind
    fields: tuple[str, ...]  # fields that a record must have; the last one of rated answers is the label
    optional: tuple[str, ...] = ()  # fields that a record may have
    prompts: tuple[str, ...] = field(default=(), repr=False)  # fields of which one holds the prompt of the answers
    answers: tuple[str, ...] = field(default=(), repr=False)  # fields of the answers to a prompt
    unused: tuple[str, ...] = field(default=(), repr=False)  # fields that are not read on purpose
    elsewhere: tuple[tuple[str, ...], ...] = field(default=(), repr=False)  # required fields of each other format

    def missing(self, names: Collection[str]) -> str | None:
        """Return a required field that is not in `names`, the fields of a record."""
        required = (*self.fields, *self.prompts) if len(self.prompts) == 1 else self.fields
        return next((name for name in required if name not in names), None)

    def check(self, names: Collection[str], where: str | Path) -> None:
        """Raise UserError if a required field is missing from `names`, the fields of a record."""
        missing = self.missing(names)
        if missing is None:
            return
        foreign = next((fields for fields in self.elsewhere if set(fields) <= set(names)), None)
        if foreign is not None:
            raise DataError(
                f"no field {missing!r}, which the first record has, but {foreign[0]!r}: give records of different"
                " formats sources of their own, data.sources",
                where,
            )
        keys = "" if self.elsewhere else _KEYS[self.kind]  # the first record of a detected format has the field
        raise _missing_field(missing, names, keys, where)

    def read(self, record: Mapping[str, Any], where: str) -> Document:
        """Return the document of a record; it is blank if the record is empty.

        Raises BadRecordError for a record that cannot be read, and DataError for a record of another format.
        """
        try:
            check_depth(record)
        except TooDeepError as error:
            raise BadRecordError(f"{error} in this record", where, "a record that nests too deeply, left out") from None
        if self.elsewhere and all(record.get(name) in (None, "") for name in self.fields):
            foreign = next((fields for fields in self.elsewhere if all(record.get(name) for name in fields)), None)
            if foreign is not None:
                raise DataError(
                    f"{self.fields[0]!r} is null here, but {foreign[0]!r} is not: give records of different formats"
                    " sources of their own, data.sources",
                    where,
                )
        prompt = self._prompt(record, where)
        unread = self._unread(record, prompt)
        content = self._content(record, prompt, unread, where)
        text = content if isinstance(content, str) else _as_json(content)
        kind: Kind = "messages" if self.kind == "text" and isinstance(content, dict) else self.kind
        notes = []
        if isinstance(content, dict) and prompt is None and "prompt" in content.get("chosen", ()):
            notes.append((IMPLICIT_PROMPT, ""))
        # A data set may repeat a part of its records in another field.
        spelled = str if kind == "text" else lambda value: _as_json(value)[1:-1]
        unread = [name for name in unread if spelled(record[name]) not in text]
        if unread and text:
            notes.append((UNREAD, ", ".join(unread)))
        return Document(text, kind, 0, notes=tuple(notes), where=where, fields=record.keys())

    def _prompt(self, record: Mapping[str, Any], where: str) -> str | None:
        """Return the field of the record's prompt; None for a pair without one."""
        if len(self.answers) < 2:
            return next(iter(self.prompts), None)
        filled = [name for name in self.prompts if record.get(name)]
        if len(filled) > 1 and filled[0] != "prompt":
            raise BadRecordError(
                f"{' and '.join(map(repr, filled))} may both hold the prompt: set {_KEYS[self.kind]}",
                where,
                UNCLEAR_PROMPT,
            )
        return next((name for name in (*filled, *self.prompts) if record.get(name) or record.get(name) == ""), None)

    def _unread(self, record: Mapping[str, Any], prompt: str | None) -> list[str]:
        used = {*self.fields, *self.unused, prompt}
        if self.kind != "text":
            used |= {*_CONTEXT_FIELDS, *((*INPUTS, "history") if prompt == INSTRUCTION else ())}
        return [name for name in record if name not in used and _holds_text(record[name])]

    def _content(
        self, record: Mapping[str, Any], prompt: str | None, unread: Sequence[str], where: str
    ) -> str | dict[str, Any]:
        """Return a text, or a document as record_answers.py describes it; "" for an empty record."""
        name = self.fields[0]
        if self.kind == "text" and not isinstance(record[name], list):
            return read_text(record[name], name, where, "text or a list of messages")
        if self.kind != "text" and is_excluded(record, where):
            raise BadRecordError(
                "a loss flag of the record excludes it", where, "a record that its own loss flag excludes, left out"
            )
        if self.prompts:
            others = [*unread, *(["system"] if record.get("system") else [])]
            documents = read_answers(prompt, self.answers, record, others, where)
        else:
            documents = read_chat(record[name], record if self.kind != "text" else {}, name, where)
        if self.kind == "rated" and documents:
            rating = truth(record[self.fields[-1]])
            if rating is None:
                raise BadRecordError(
                    f"field {self.fields[-1]!r} must be true or false, not {record[self.fields[-1]]!r}",
                    where,
                    "a record whose label is neither true nor false, left out",
                )
            # Of a rated chat, the last message is rated.
            rated = {} if self.prompts else {"context": len(documents[0]["messages"]) - 1}
            return documents[0] | rated | {"label": rating}
        if self.kind == "preference":
            return dict(zip(("chosen", "rejected"), documents, strict=True)) if documents else ""
        return documents[0] if documents else ""

    def columns(self, names: Iterable[str]) -> list[str]:
        """Return those columns of a table (`names`) that `read` uses."""
        fields = {*self.fields, *self.optional, *(name for fields in self.elsewhere for name in fields)}
        # Whether a pair without a prompt has other text decides what its prompt is.
        return [name for name in names if name in fields or self.kind == "preference"]


def _holds_text(value: object) -> bool:
    """Return whether a value is text with letters, or a chat; a table may hold numbers and dates as text."""
    if isinstance(value, str):
        return any(map(str.isalpha, value))
    return isinstance(value, list) and bool(value) and is_message(value[0])


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=_as_text)


def _as_text(value: Any) -> str:
    """Return as text a table value of a type that JSON lacks (time, date, decimal, bytes)."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def words(text: str, kind: Kind) -> list[str]:
    """Return the texts of a document that `Format.read` returned: the contents of messages, or the fields."""
    if kind == "text" or not text:
        return [text]
    record = json.loads(text)
    parts: list[str] = []
    for answer in (record["chosen"], record["rejected"]) if kind == "preference" else (record,):
        parts += [part for message in answer.get("messages", ()) for part in text_parts(message)]
        parts += [part for name, part in answer.items() if isinstance(part, str) and name != "left_out"]
    return parts


def format_of(section: RecordsSection, present: Collection[str], where: str | Path) -> Format:
    """Return the format that `section` names, else the first one whose fields are all `present` in the records.

    A preference objective names the fields of TRL; instead of them, those of other trainers are read, too.
    Raises UserError if a field is missing, or if no format fits.
    """
    is_trl = section.label is not None and (section.prompt, section.completion) == ("prompt", "completion")
    if section.text_field is not None:
        forms = [Format("text", (section.text_field,))]
    elif section.messages is not None:
        forms = [Format("messages", (section.messages,), _CONTEXT_FIELDS)]
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


def _recognised_formats(names: Collection[str]) -> list[Format]:
    """Return the formats of single answers, and the format of texts, in the order of preference."""
    forms = [Format(chat, (chat,), _CONTEXT_FIELDS) for chat in CHATS]
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
    optional = (*INPUTS, *_CONTEXT_FIELDS, "history") if INSTRUCTION in prompts else _CONTEXT_FIELDS
    if kind == "preference":
        return Format(kind, answers, (*prompts, *optional), prompts, answers)
    return Format(kind, (*prompts, *answers), optional, prompts, answers)


def unknown_field(fields: Collection[str], names: Collection[str], where: str) -> BadRecordError | None:
    """Return the error for one of `fields` (data.unused_fields) that is not in `names`, the fields of the records."""
    unknown = sorted(set(fields) - set(names))
    return _missing_field(unknown[0], names, "data.unused_fields", where, UNKNOWN_FIELD) if unknown else None


def _missing_field(
    missing: str, names: Iterable[str], keys: str, where: str | Path, reason: str = MISSING_FIELD
) -> BadRecordError:
    """Return the error for a field that is not in `names`; `keys` of the configuration may name another field."""
    present = list(map(str, names))
    near = get_close_matches(missing, present, 1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    message = f"no field {missing!r}; there are {', '.join(present)}{meant}{keys and f': set {keys}'}"
    return BadRecordError(message, where, reason)


def _unknown_format(names: Collection[str], where: str | Path) -> DataError:
    if any(set(pair) <= set(names) for pair in _PAIRS):
        return DataError("the records are pairs of answers: set train.objective, for example to dpo", where)
    message = "no fields: an empty file, or no header"
    if names:
        message = (
            f"no known field; there are {', '.join(map(str, names))}: set data.text_field (all of it is"
            " learned), data.messages (a chat), or data.prompt and data.completion"
        )
    return BadRecordError(message, where, MISSING_FIELD)


def _present(names: Collection[str], *candidates: str) -> tuple[str, ...]:
    return tuple(name for name in candidates if name in names)
