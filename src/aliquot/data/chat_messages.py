"""Read the messages of a record, and check their roles, contents, loss flags and tool calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from aliquot.core.decode import decode_json
from aliquot.data.documents import UNKNOWN_ROLE, UNUSABLE_FLAG, BadRecordError

T = TypeVar("T")
_ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}  # roles of chat templates
_ALIASES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
    "tool_response": "tool", "tool_call": "assistant",
}  # fmt: skip
_TOOLS = {"tool", "function", "ipython"}  # roles whose content may be any JSON value
_CALLING_ROLES = ("function_call", "tool_call")  # of ShareGPT and ms-swift; the content is a tool call, as JSON
# Keys of OpenAI, axolotl, ms-swift, verl and others that exclude a message or a record from the loss, or include it.
LOSS_FLAGS = (
    "weight", "train", "training", "train_detail", "loss", "loss_scale", "trainable", "loss_mask",
)  # fmt: skip
TRAIN_DETAIL = "train_detail"  # as in axolotl, also a list of parts: the indices of their first and last characters
# The beginning of messages in JSON or in Python's notation, of which texts like `[{"role": ...` are taken for messages.
_MESSAGES_AS_TEXT = re.compile(
    r"""\s*\[?\s*\{(?=.*["'](?:role|from)["']\s*:)\s*["'](?:role|from|content|value)["']\s*:""", re.S
)
_TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
UNREADABLE_CALL = "a call of a function that cannot be read as one, left out"


def text_parts(message: Mapping[str, Any]) -> list[str]:
    """Return the texts in the content of a message. The content may be text, a list of parts, null or absent."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if _is_text(part)] if isinstance(content, list) else []


def is_learned(message: Mapping[str, Any], roles: Collection[str] = ("assistant",)) -> bool:
    """Return whether the loss includes this message: its role is one of `roles`, and no flag excludes it."""
    return message["role"] in roles and all(message.get(flag) is None or message[flag] for flag in LOSS_FLAGS)


def unread_flags(message: Mapping[str, Any], template: str) -> list[str]:
    """Return the keys with a boolean value that neither aliquot nor the chat template `template` (Jinja) uses."""
    flags = (key for key, value in message.items() if isinstance(value, bool) and key not in LOSS_FLAGS)
    return [flag for flag in flags if not re.search(rf"\b{re.escape(flag)}\b", template)]


def truth(value: object) -> bool | None:
    """Return whether a field says true (true, 1) or false (false, 0), also as the text of a table; None: neither."""
    return _TRUTHS.get(str(value).strip().lower())


def is_excluded(record: Mapping[str, Any], where: str) -> bool:
    """Return whether a loss flag of a whole record excludes it.

    Raises BadRecordError for a weight between 0 and 1, or above. Other values of other flags are not for training:
    `loss` may hold the loss of an earlier model.
    """
    flags = {flag: truth(record[flag]) for flag in LOSS_FLAGS if record.get(flag) not in (None, "")}
    if flags.get("weight", True) is None:
        raise BadRecordError(
            f"the record's `weight` is {record['weight']!r}: a record is learned or not. Write 1 or 0, or rename the"
            " field",
            where,
            UNUSABLE_FLAG,
        )
    return False in flags.values()


def read_text(value: object, field: str, where: str, expected: str = "text") -> str:
    """Return the text in a field; an empty one if it is null."""
    if value is not None and not isinstance(value, str):
        raise BadRecordError(f"field {field!r} holds {type(value).__name__}, not {expected}", where)
    return value or ""


def read_text_or_messages(value: object, field: str, where: str) -> str | list[dict[str, Any]]:
    """Return the text or the messages in a field: a list of messages, one message, or either of them as JSON text."""
    if isinstance(value, str) and _MESSAGES_AS_TEXT.match(value):
        listed = _from_json(value, field, where)
        messages = listed if isinstance(listed, list) else [listed]
        value = messages if all(map(is_message, messages)) else value
    if is_message(value):
        value = [value]
    return read_messages(value, field, where) if isinstance(value, list) else read_text(value, field, where)


def is_message(value: object) -> bool:
    """Return whether a value is an object with the key of a message's role."""
    return isinstance(value, dict) and not {"role", "from"}.isdisjoint(value)


def read_as(kind: type[T], value: object, field: str, where: str) -> T:
    """Return the list or object (dict) in a field, decoded from JSON if the field holds text.

    If the field is null or blank, the list or object is empty.
    """
    if isinstance(value, str) and value.strip():
        value = _from_json(value, field, where)
    value = kind() if isinstance(value, str) else value or kind()
    if not isinstance(value, kind):
        raise BadRecordError(
            f"field {field!r} holds {type(value).__name__}, not {'a list' if kind is list else 'an object'}", where
        )
    return value


def _from_json(text: str, field: str, where: str) -> Any:
    try:
        return decode_json(text)
    except ValueError as error:
        raise BadRecordError(
            f"field {field!r} holds text that is not JSON ({error}): write JSON (json.dumps), or rename the field if no"
            " chat template uses it",
            where,
        ) from error


def read_messages(value: object, field: str, where: str) -> list[dict[str, Any]]:
    """Return the messages in a field, which may hold them as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("", "["):  # tables often hold messages as JSON text
        value = read_as(list, value, field, where)
    if not isinstance(value, list):
        raise BadRecordError(f"field {field!r} holds {type(value).__name__}, not a list of messages", where)
    return [read_message(message, field, where) for message in value]


def read_message(message: object, field: str, where: str) -> dict[str, Any]:
    """Return the message with the usual keys and roles: `from` becomes `role`, `value` becomes `content`.

    Tool calls in JSON text are decoded. Raises BadRecordError for a malformed message.
    """
    role = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str):
        raise BadRecordError(
            f"field {field!r} is a list, but not one of messages with `role` and `content`",
            where,
            "a record with messages that lack a role or are no objects, left out",
        )
    known_role = _ALIASES.get(role.lower(), role.lower())
    if known_role not in _ROLES:
        raise BadRecordError(
            f"a message's role is {role!r}; known are {', '.join(sorted(_ROLES | _ALIASES.keys()))}: rename it",
            where,
            UNKNOWN_ROLE,
        )
    other_keys = {key: part for key, part in message.items() if key not in ("role", "from", "content", "value")}
    content = [{"content": message[key]} for key in ("content", "value") if key in message][:1]
    parts: dict[str, Any] = {"role": known_role, **(content[0] if content else {}), **other_keys}
    said = parts.get("content")
    is_said = said is None or isinstance(said, str) or (isinstance(said, list) and all(map(_is_text, said)))
    if not is_said and known_role not in _TOOLS:
        raise BadRecordError(
            "a message's `content` must be text, or a list of parts of type `text`",
            where,
            "a record with message content other than text, left out",
        )
    _check_flags(parts, where)
    if role.lower() in _CALLING_ROLES:
        return {**parts, "content": "", "tool_calls": _calls_in("".join(text_parts(parts)))}
    if isinstance(called := parts.get("tool_calls"), str):  # tables often hold calls as JSON text
        parts["tool_calls"] = _calls_in(called) if called.strip() else None
    return parts


def _check_flags(message: dict[str, Any], where: str) -> None:
    """Refuse flags that cannot be obeyed, and decode those that are text."""
    for flag in LOSS_FLAGS:
        value = message.get(flag)
        if flag == TRAIN_DETAIL and has_detail(message):
            _check_detail(message, where)
        elif value is not None and (verdict := truth(value)) is None:
            raise BadRecordError(
                f"a message's `{flag}` is {value!r}: an answer is learned or not. Write 1 or 0, or true or false",
                where,
                UNUSABLE_FLAG,
            )
        elif isinstance(value, str):
            value = message[flag] = verdict
        if value and flag != "weight" and message["role"] != "assistant":
            raise BadRecordError(
                f"a message of role {message['role']!r} has `{flag}`: {value!r}, but answers of the assistant alone are"
                " learned. Remove the key",
                where,
                UNUSABLE_FLAG,
            )


def _check_detail(message: Mapping[str, Any], where: str) -> None:
    for part in message[TRAIN_DETAIL]:
        if not _is_part(part):
            raise BadRecordError(
                f"a message's `{TRAIN_DETAIL}` has {part!r}: a part has begin_offset, end_offset (the index of its last"
                " character) and train (true or false)",
                where,
                UNUSABLE_FLAG,
            )
    if message[TRAIN_DETAIL] and not isinstance(message.get("content"), str):
        raise BadRecordError(f"a message has `{TRAIN_DETAIL}`, but its `content` is no text", where, UNUSABLE_FLAG)


def _is_part(part: object) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("train"), bool):
        return False
    begin, end = part.get("begin_offset"), part.get("end_offset")
    return type(begin) is int and type(end) is int and 0 <= begin <= end


def has_detail(message: Mapping[str, Any]) -> bool:
    """Return whether `train_detail` lists the parts of a message to learn."""
    return isinstance(message.get(TRAIN_DETAIL), list)


def _calls_in(text: str) -> list[Any]:
    """Return the tool calls in JSON `text`. Anything else is returned unchanged, so that the record is left out."""
    try:
        value = decode_json(text)
    except ValueError:
        value = text
    listed = value if isinstance(value, list) else [value]
    return [call if not _is_named(call) else {"type": "function", "function": call} for call in listed]


def has_readable_calls(message: Mapping[str, Any]) -> bool:
    """Return whether each tool call of the message names a function."""
    called, older = message.get("tool_calls") or [], message.get("function_call")
    calls = [*called, *([older] if older else [])] if isinstance(called, list) else [None]
    return all(_is_named(function_in(call)) for call in calls)


def functions_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the called functions, with their arguments, in the `tool_calls` of a message."""
    listed = message.get("tool_calls")
    return [function_in(call) for call in listed] if isinstance(listed, list) else []


def function_in(call: object) -> Any:
    """Return the function in a tool call or tool definition, which OpenAI's schema nests under `function`."""
    return call.get("function", call) if isinstance(call, dict) else None


def _is_named(function: object) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
