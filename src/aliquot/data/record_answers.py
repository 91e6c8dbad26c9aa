"""Read the fields of a record into a document: text, a chat, a prompt with its completion, or a pair of answers.

A record with an answer becomes a JSON object in one of three forms, which chat.py encodes:

- `{"messages": [...], "context": n}`, where the first n messages are not learned,
- `{"prompt": ..., "completion": ...}`,
- `{"instruction": ..., "input": ..., "output": ...}`.

A pair of answers becomes `{"chosen": ..., "rejected": ...}`, each in one of the first two forms. A rated answer has one
of these two forms with `"label"`, which is true or false.

The object also has `"system"`, `"tools"` and `"chat_template_kwargs"` if the record has them. Messages stay unchanged,
because the chat template decides how to render them. A chat with a tool call that cannot be read gets
`"left_out": reason`, so that the chat is counted and not learned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aliquot.data.chat_messages import (
    UNREADABLE_CALL,
    has_readable_calls,
    read_list,
    read_message,
    read_messages,
    read_object,
    text_parts,
)
from aliquot.data.documents import NO_RATING, BadRecordError

INPUTS = ("input", "context")  # field names of the input in Alpaca's and in Dolly's format


def read_text(value: object, field: str, where: str, expected: str = "text") -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRecordError(f"field {field!r} holds {type(value).__name__}, not {expected}", where)
    return value


def read_completion(prompt: str, completion: str, record: Mapping[str, Any], where: str) -> str:
    if isinstance(record[prompt], list) or isinstance(record[completion], list):
        questions = read_messages(record[prompt] or [], prompt, where, plain="user")
        answers = read_messages(record[completion] or [], completion, where, plain="assistant")
        whole = _with_system(questions + answers, record, where)
        return _conversation(whole, len(whole) - len(answers), _template_values(record, where))
    parts = {
        "prompt": read_text(record[prompt], prompt, where),
        "completion": read_text(record[completion], completion, where),
    }
    return _with_context(parts, record, where)


def read_rated(fields: tuple[str, ...], record: Mapping[str, Any], where: str) -> str:
    """Return an answer with its prompt, and whether the answer is desirable."""
    prompt, completion, label = fields
    text = read_completion(prompt, completion, record, where)
    if record[label] not in (True, False):  # tables may hold 1 and 0
        raise BadRecordError(f"field {label!r} must be true or false, not {record[label]!r}", where, NO_RATING)
    return f'{text[:-1]}, "label": {json.dumps(bool(record[label]))}}}' if text else ""


def read_pair(answers: tuple[str, ...], prompt: str, record: Mapping[str, Any], where: str) -> str:
    """Return the two answers of a pair with their prompt; without a prompt, their common beginning is the prompt."""
    both = [record[field] for field in answers]
    if not all(both):
        return ""
    kinds = {isinstance(value, list) for value in both}
    if len(kinds) > 1:
        raise BadRecordError(f"fields {answers[0]!r} and {answers[1]!r} must both be text or both be messages", where)
    asked = record.get(prompt)
    if kinds == {True}:
        chats = [read_messages(value, field, where) for value, field in zip(both, answers, strict=True)]
        # Some data sets have a column `prompt`, although each answer is the whole chat.
        if asked and (isinstance(asked, list) or chats[0][0]["role"] == "assistant"):
            questions = read_messages(asked, prompt, where, plain="user")
            chats, context = [[*questions, *chat] for chat in chats], len(questions)
        else:
            context = _common(*chats)
        values = _template_values(record, where)
        whole = [_with_system(chat, record, where) for chat in chats]
        context += len(whole[0]) - len(chats[0])
        texts = [_conversation(chat, context, values) for chat in whole]
    else:
        chosen, rejected = (read_text(value, field, where) for value, field in zip(both, answers, strict=True))
        if asked is None:
            length = _common(chosen, rejected)
            length -= chosen[:length].endswith(" ")  # the space before an answer belongs to the answer
            asked, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
        pairs = [{"prompt": asked, "completion": answer} for answer in (chosen, rejected)]
        texts = [read_completion("prompt", "completion", {**record, **pair}, where) for pair in pairs]
    return f'{{"chosen": {texts[0]}, "rejected": {texts[1]}}}' if all(texts) else ""


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts or chats."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def read_instruction(output: str, record: Mapping[str, Any], where: str) -> str:
    inputs = [field for field in INPUTS if record.get(field)][:1]
    parts = {
        "instruction": read_text(record["instruction"], "instruction", where),
        "input": "".join(read_text(record[field], field, where) for field in inputs),
        "output": read_text(record[output], output, where),
    }
    turns = read_list(record.get("history"), "history", where)
    if not turns:
        return _with_context(parts, record, where)
    messages = []
    for turn in turns:
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadRecordError("field 'history' must be a list of pairs: a question, and its answer", where)
        for role, text in zip(("user", "assistant"), turn, strict=True):
            messages.append({"role": role, "content": read_text(text, "history", where)})
    asked = "\n\n".join(filter(None, (parts["instruction"], parts["input"])))
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": parts["output"]}]
    return _conversation(_with_system(messages, record, where), 0, _template_values(record, where))


def _with_context(parts: dict[str, str], record: Mapping[str, Any], where: str) -> str:
    if not any(part.strip() for part in parts.values()):
        return ""
    context: dict[str, Any] = {"system": read_text(record.get("system"), "system", where)}
    return _as_json(parts | {key: part for key, part in context.items() if part} | _template_values(record, where))


def read_chat(value: object, record: Mapping[str, object], field: str, where: str) -> str:
    messages = _with_system(read_messages(value or [], field, where), record, where)
    return _conversation(messages, 0, _template_values(record, where))


def _with_system(messages: list[dict[str, Any]], record: Mapping[str, object], where: str) -> list[dict[str, Any]]:
    """Return the messages with the record's `system` in front, unless the first message has the same text."""
    content = record.get("system")
    if not messages or not content:
        return messages
    system = read_message({"role": "system", "content": content}, "system", where)
    return messages if text_parts(messages[0]) == text_parts(system) else [system, *messages]


def _conversation(messages: list[dict[str, Any]], context: int, template_values: dict[str, Any]) -> str:
    if not messages:
        return ""
    extras = dict(template_values)
    if not all(map(has_readable_calls, messages)):
        extras["left_out"] = UNREADABLE_CALL
    return _as_json({"messages": messages, "context": context, **extras})


def _as_json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, default=_as_text)


def _as_text(value: Any) -> str:
    """Return as text a table value of a type that JSON lacks (time, date, decimal, bytes)."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def _template_values(record: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return the record's `tools` and `chat_template_kwargs` for the chat template, as TRL does.

    Tables often hold both as JSON text.
    """
    tools = read_list(record.get("tools"), "tools", where)
    values = read_object(record.get("chat_template_kwargs"), "chat_template_kwargs", where)
    return {name: value for name, value in (("tools", tools), ("chat_template_kwargs", values)) if value}
