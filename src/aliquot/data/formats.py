"""What a record is, by the names of its fields: a text, a chat, a prompt and its completion, an instruction.

Whatever has an answer becomes one JSON object, of which chat.py knows what is learned:
`{"messages": [...], "context": n}` (the first n are not learned), `{"prompt": ..., "completion": ...}`, or
`{"instruction": ..., "input": ..., "output": ...}`; with `"system": ...` and `"tools": [...]` where there are any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aliquot.config.data_section import RecordsSection
from aliquot.errors import DataError
from aliquot.nesting import TooDeepError, check_depth, decode_json

Kind = Literal["text", "messages", "conversations", "prompt", "instruction"]

TITLES: dict[str, str] = {
    "text": "texts",
    "messages": "chats (messages)",
    "conversations": "chats (ShareGPT)",
    "prompt": "prompts with completions",
    "instruction": "instructions (Alpaca)",
}
_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")  # Alpaca's names, Dolly's
_BESIDE = ("system", "tools")  # what may be beside a record's own fields
_ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}  # what templates know
_ALIASES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    kind: Kind
    fields: tuple[str, ...]  # that a record must have
    others: tuple[str, ...] = ()  # that it may have
    elsewhere: tuple[tuple[str, ...], ...] = field(default=(), repr=False)  # fields of what it may be instead

    def check(self, names: Iterable[str], where: str | Path) -> None:
        """Raises UserError naming the first field that is not there."""
        found = list(names)
        missing = next((name for name in self.fields if name not in found), None)
        other = next((fields for fields in self.elsewhere if set(fields) <= set(found)), None)
        if missing is not None and other is not None:
            raise DataError(
                f"no field {missing!r}, which the first record has, but {other[0]!r}: give records of different formats"
                " sources of their own, data.sources",
                where,
            )
        if missing is not None:
            raise DataError(f"no field {missing!r}; there are {', '.join(map(str, found))}", where)

    def read(self, record: Mapping[str, Any], where: str) -> tuple[str, Kind]:
        """(the document, its kind); an empty document where there is nothing in the record.

        Raises UserError at values of other types, at a role that no template knows, at a record without its own
        fields that has those of another format, and at endless nesting.
        """
        try:
            check_depth(record)
        except TooDeepError as error:
            raise DataError(f"{error} in this record", where) from None
        return self._read(record, where)

    def _read(self, record: Mapping[str, Any], where: str) -> tuple[str, Kind]:
        if self.elsewhere and all(record.get(name) in (None, "") for name in self.fields):
            other = next((fields for fields in self.elsewhere if all(record.get(name) for name in fields)), None)
            if other is not None:
                raise DataError(
                    f"{self.fields[0]!r} is null here, but {other[0]!r} is not: give records of different formats"
                    " sources of their own, data.sources",
                    where,
                )
        if self.kind == "text":
            value = record[self.fields[0]]
            if isinstance(value, list):
                return _chat(value, {}, self.fields[0], where), "messages"
            return _text(value, self.fields[0], where, "text or a list of messages"), "text"
        if self.kind in ("messages", "conversations"):
            return _chat(record[self.fields[0]], record, self.fields[0], where), self.kind
        if self.kind == "prompt":
            return _prompted(self.fields[0], self.fields[1], record, where), self.kind
        return _instructed(self.fields[1], record, where), self.kind

    def columns(self, names: Iterable[str]) -> list[str]:
        """Of those of a table all that `read` looks at."""
        wanted = {*self.fields, *self.others, *(name for fields in self.elsewhere for name in fields)}
        return [name for name in names if name in wanted]


def words(text: str, kind: Kind) -> list[str]:
    """The texts in a document."""
    if kind == "text" or not text:
        return [text]
    record = json.loads(text)
    if "messages" in record:
        return [message["content"] for message in record["messages"]]
    return [part for part in record.values() if isinstance(part, str)]


def format_of(section: RecordsSection, names: Iterable[str], where: str | Path) -> Format:
    """The format that `section` names, else that of records with fields `names`. Raises UserError where it is none."""
    found = list(names)
    if section.text_field is not None:
        named = Format("text", (section.text_field,))
    elif section.messages is not None:
        named = Format("messages", (section.messages,), _of(found, *_BESIDE))
    elif section.prompt is not None and section.completion is not None:
        named = Format("prompt", (section.prompt, section.completion), _of(found, *_BESIDE))
    else:
        return _found(found, where)
    try:
        named.check(found, where)
    except DataError as error:
        raise DataError(f"{error}: set data.text_field, or the keys of another format") from None
    return named


def _found(names: list[str], where: str | Path) -> Format:
    outputs = _of(names, *_OUTPUTS)
    known: list[tuple[Kind, tuple[str, ...], tuple[str, ...]]] = [
        ("messages", ("messages",), _BESIDE),
        ("conversations", ("conversations",), _BESIDE),
        ("prompt", ("prompt", "completion"), _BESIDE),
        ("instruction", ("instruction", *(outputs[:1] or _OUTPUTS)), (*_INPUTS, *_BESIDE, "history")),
        ("text", ("text",), ()),
    ]
    there = [each for each in known if set(each[1]) <= set(names)]
    if not there and not names:
        raise DataError("no fields: an empty file, or no header", where)
    if not there:
        raise DataError(
            f"no field that is known; there are {', '.join(map(str, names))}: set data.text_field (all of it is"
            " learned), data.messages (a chat), or data.prompt and data.completion",
            where,
        )
    kind, fields, others = there[0]
    return Format(kind, fields, _of(names, *others), tuple(other for _, other, _ in known if other != fields))


def _of(names: Iterable[str], *wanted: str) -> tuple[str, ...]:
    found = set(names)
    return tuple(name for name in wanted if name in found)


def _text(value: object, field: str, where: str, expected: str = "text") -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"field {field!r} holds {type(value).__name__}, not {expected}", where)
    return value


def _prompted(prompt: str, completion: str, record: Mapping[str, Any], where: str) -> str:
    if isinstance(record[prompt], list) or isinstance(record[completion], list):
        asked = _messages(record[prompt] or [], prompt, where, plain="user")
        answered = _messages(record[completion] or [], completion, where, plain="assistant")
        whole = _with_system(asked + answered, record)
        return _conversation(whole, len(whole) - len(answered), _tools(record.get("tools"), where))
    parts = {"prompt": _text(record[prompt], prompt, where), "completion": _text(record[completion], completion, where)}
    return _parts(parts, record, where)


def _instructed(output: str, record: Mapping[str, Any], where: str) -> str:
    inputs = [field for field in _INPUTS if record.get(field)][:1]
    parts = {
        "instruction": _text(record["instruction"], "instruction", where),
        "input": "".join(_text(record[field], field, where) for field in inputs),
        "output": _text(record[output], output, where),
    }
    turns = _listed(record.get("history"), "history", where)
    if not turns:
        return _parts(parts, record, where)
    messages = []
    for turn in turns:
        if not isinstance(turn, list) or len(turn) != 2:
            raise DataError("field 'history' must be a list of pairs: what was asked, what was answered", where)
        for role, said in zip(("user", "assistant"), turn, strict=True):
            messages.append({"role": role, "content": _text(said, "history", where)})
    asked = "\n\n".join(filter(None, (parts["instruction"], parts["input"])))
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": parts["output"]}]
    return _conversation(_with_system(messages, record), 0, _tools(record.get("tools"), where))


def _parts(parts: dict[str, str], record: Mapping[str, Any], where: str) -> str:
    if not any(part.strip() for part in parts.values()):
        return ""
    beside: dict[str, Any] = {"system": _text(record.get("system"), "system", where)}
    beside["tools"] = _tools(record.get("tools"), where)
    return json.dumps(parts | {key: part for key, part in beside.items() if part}, ensure_ascii=False)


def _chat(value: object, record: Mapping[str, object], field: str, where: str) -> str:
    messages = _with_system(_messages(value or [], field, where), record)
    return _conversation(messages, 0, _tools(record.get("tools"), where))


def _with_system(messages: list[dict[str, Any]], record: Mapping[str, object]) -> list[dict[str, Any]]:
    system = record.get("system")
    if messages and isinstance(system, str) and system and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _conversation(messages: list[dict[str, Any]], context: int, tools: list[Any]) -> str:
    if not messages:
        return ""
    beside = {"tools": tools} if tools else {}
    return json.dumps({"messages": messages, "context": context, **beside}, ensure_ascii=False)


def _tools(value: object, where: str) -> list[Any]:
    """What a template is told that the assistant may call; tables often hold it as JSON."""
    return _listed(value, "tools", where)


def _listed(value: object, field: str, where: str) -> list[Any]:
    """A list, or JSON that holds one; empty where there is none."""
    if isinstance(value, str) and value.strip():
        try:
            value = decode_json(value)
        except ValueError as error:
            raise DataError(
                f"field {field!r} holds text that is not JSON ({error}): name it otherwise if it is for no template",
                where,
            ) from error
    if not value or isinstance(value, str):
        return []
    if not isinstance(value, list):
        raise DataError(f"field {field!r} holds {type(value).__name__}, not a list", where)
    return value


def _messages(value: object, field: str, where: str, plain: str | None = None) -> list[dict[str, Any]]:
    """`plain`: the role of a text that is no list."""
    if isinstance(value, str) and plain is not None:
        return [{"role": plain, "content": value}]
    if isinstance(value, str) and not value.strip():
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):  # tables often hold it as JSON
        value = _listed(value, field, where)
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
    parts, content = _calls(parts, role, parts.pop("content", parts.pop("value", "")))
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError("a message's `content` must be text", where)
    return {"role": known, "content": content, **parts}


def _calls(parts: dict[str, Any], role: str, content: Any) -> tuple[dict[str, Any], Any]:
    """(keys of a message, its content), calls of functions as templates want them: arguments as an object, not as the
    JSON that OpenAI's are, which a template would write as JSON once more; ShareGPT's `function_call` as a call."""
    called = _json_objects(content) if role == "function_call" and isinstance(content, str) else []
    if called and all(isinstance(call.get("name"), str) for call in called):
        parts, content = {**parts, "tool_calls": [{"type": "function", "function": call} for call in called]}, ""
    listed = parts.pop("tool_calls", None)
    if listed:  # some templates take an empty list for a call
        parts["tool_calls"] = [_with_arguments(call) for call in listed] if isinstance(listed, list) else listed
    return parts, content


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    given = call.get("arguments")
    held = _json_objects(given) if isinstance(given, str) and given.lstrip().startswith("{") else []
    return {**call, "arguments": held[0]} if held else call


def _json_objects(text: str) -> list[dict[str, Any]]:
    """The object, or the objects of a list, that `text` holds; none where it holds something else."""
    try:
        value = decode_json(text)
    except ValueError:
        return []
    listed = value if isinstance(value, list) else [value]
    return listed if all(isinstance(each, dict) for each in listed) else []


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
