"""What a record is, by the names of its fields: a text, a chat, a prompt and its completion, an instruction.

Whatever has an answer becomes one JSON object, of which chat.py knows what is learned:
`{"messages": [...], "context": n}` (the first n are not learned; with `"tools": [...]` where there are any),
`{"prompt": ..., "completion": ...}`, or `{"instruction": ..., "input": ..., "output": ...}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aliquot.config.data_section import RecordsSection
from aliquot.errors import DataError

Kind = Literal["text", "messages", "conversations", "prompt", "instruction"]

TITLES: dict[str, str] = {
    "text": "texts",
    "messages": "chats (messages)",
    "conversations": "chats (ShareGPT)",
    "prompt": "prompts with completions",
    "instruction": "instructions (Alpaca)",
}
_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")  # Alpaca's names, Dolly's
_BESIDE = ("system", "tools")  # what may be beside a chat
_ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}  # what templates know
_ALIASES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    kind: Kind
    fields: tuple[str, ...]  # that a record must have
    others: tuple[str, ...] = ()  # that it may have

    def check(self, names: Iterable[str], where: str | Path) -> None:
        """Raises UserError naming the first field that is not there."""
        found = list(names)
        missing = next((field for field in self.fields if field not in found), None)
        if missing is not None:
            raise DataError(f"no field {missing!r}; there are {', '.join(map(str, found))}", where)

    def read(self, record: Mapping[str, Any], where: str) -> tuple[str, Kind]:
        """(the document, its kind); an empty document where there is nothing in the record.

        Raises UserError at values of other types, and at a role that no template knows.
        """
        if self.kind == "text":
            value = record[self.fields[0]]
            if isinstance(value, list):
                return _chat(value, {}, self.fields[0], where), "messages"
            return _text(value, self.fields[0], where, "text or a list of messages"), "text"
        if self.kind in ("messages", "conversations"):
            return _chat(record[self.fields[0]], record, self.fields[0], where), self.kind
        values = {field: record.get(field) for field in (*self.fields, *self.others)}
        if self.kind == "prompt":
            return _prompted(self.fields[0], self.fields[1], values, where), self.kind
        output = self.fields[1]
        inputs = [field for field in _INPUTS if record.get(field)][:1]
        parts = {
            "instruction": _text(values["instruction"], "instruction", where),
            "input": "".join(_text(record[field], field, where) for field in inputs),
            "output": _text(values[output], output, where),
        }
        if not any(part.strip() for part in parts.values()):
            return "", self.kind
        if system := _text(record.get("system"), "system", where):
            parts["system"] = system
        return json.dumps(parts, ensure_ascii=False), self.kind


def words(text: str, kind: Kind) -> list[str]:
    """The texts in a document."""
    if kind == "text" or not text:
        return [text]
    record = json.loads(text)
    return [message["content"] for message in record["messages"]] if "messages" in record else list(record.values())


def format_of(section: RecordsSection, names: Iterable[str], where: str | Path) -> Format:
    """The format that `section` names, else that of records with fields `names`. Raises UserError where it is none."""
    found = list(names)
    if section.text_field is not None:
        named = Format("text", (section.text_field,))
    elif section.messages is not None:
        named = Format("messages", (section.messages,), _of(found, *_BESIDE))
    elif section.prompt is not None and section.completion is not None:
        named = Format("prompt", (section.prompt, section.completion), _of(found, "tools"))
    else:
        return _found(found, where)
    try:
        named.check(found, where)
    except DataError as error:
        raise DataError(f"{error}: set data.text_field, or the keys of another format") from None
    return named


def _found(names: list[str], where: str | Path) -> Format:
    outputs = _of(names, *_OUTPUTS)
    if "messages" in names:
        return Format("messages", ("messages",), _of(names, *_BESIDE))
    if "conversations" in names:
        return Format("conversations", ("conversations",), _of(names, *_BESIDE))
    if {"prompt", "completion"} <= set(names):
        return Format("prompt", ("prompt", "completion"), _of(names, "tools"))
    if "instruction" in names and outputs:
        return Format("instruction", ("instruction", outputs[0]), _of(names, *_INPUTS, "system"))
    if "text" in names:
        return Format("text", ("text",))
    raise DataError(
        f"no field that is known; there are {', '.join(map(str, names))}: set data.text_field (all of it is learned),"
        " data.messages (a chat), or data.prompt and data.completion",
        where,
    )


def _of(names: Iterable[str], *wanted: str) -> tuple[str, ...]:
    found = set(names)
    return tuple(name for name in wanted if name in found)


def _text(value: object, field: str, where: str, expected: str = "text") -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"field {field!r} holds {type(value).__name__}, not {expected}", where)
    return value


def _prompted(prompt: str, completion: str, values: Mapping[str, object], where: str) -> str:
    if isinstance(values[prompt], list) or isinstance(values[completion], list):
        asked = _messages(values[prompt] or [], prompt, where, plain="user")
        answered = _messages(values[completion] or [], completion, where, plain="assistant")
        return _conversation(asked + answered, len(asked), _tools(values.get("tools"), where))
    asked_text, answer = _text(values[prompt], prompt, where), _text(values[completion], completion, where)
    if not (asked_text + answer).strip():
        return ""
    return json.dumps({"prompt": asked_text, "completion": answer}, ensure_ascii=False)


def _chat(value: object, record: Mapping[str, object], field: str, where: str) -> str:
    messages, system = _messages(value or [], field, where), record.get("system")
    if messages and isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return _conversation(messages, 0, _tools(record.get("tools"), where))


def _conversation(messages: list[dict[str, Any]], context: int, tools: list[Any]) -> str:
    if not messages:
        return ""
    beside = {"tools": tools} if tools else {}
    return json.dumps({"messages": messages, "context": context, **beside}, ensure_ascii=False)


def _tools(value: object, where: str) -> list[Any]:
    """What a template is told that the assistant may call; tables often hold it as JSON."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"field 'tools' holds text that is not JSON ({error}): name it otherwise if it is for no template",
                where,
            ) from error
    if not value:
        return []
    if not isinstance(value, list):
        raise DataError(f"field 'tools' holds {type(value).__name__}, not a list of tools", where)
    return value


def _messages(value: object, field: str, where: str, plain: str | None = None) -> list[dict[str, Any]]:
    """`plain`: the role of a text that is no list."""
    if isinstance(value, str) and plain is not None:
        return [{"role": plain, "content": value}]
    if not isinstance(value, list):
        raise DataError(f"field {field!r} holds {type(value).__name__}, not a list of messages", where)
    return [_message(message, field, where) for message in value]


def _message(message: object, field: str, where: str) -> dict[str, Any]:
    """With `role` and `content`, also where they are called `from` and `value`; keys that are null are left out."""
    if not isinstance(message, dict):
        raise DataError(f"field {field!r} is a list, but not one of messages with `role` and `content`", where)
    parts = {key: part for key, part in message.items() if part is not None}
    role = parts.pop("role", None) or parts.pop("from", None)
    if not isinstance(role, str):
        raise DataError(f"field {field!r} is a list, but not one of messages with `role` and `content`", where)
    known = _ALIASES.get(role.lower(), role.lower())
    if known not in _ROLES:
        raise DataError(
            f"a message's role is {role!r}; known are {', '.join(sorted(_ROLES | _ALIASES.keys()))}: rename it", where
        )
    content = parts.pop("content", parts.pop("value", ""))
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError("a message's `content` must be text", where)
    return {"role": known, "content": content, **parts}


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
