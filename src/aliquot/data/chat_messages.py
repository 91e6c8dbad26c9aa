"""Check the messages of a chat: roles, contents, learning flags, and calls of functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aliquot.core.decode import decode_json
from aliquot.data.documents import NO_MESSAGES, NO_TEXT_CONTENT, UNKNOWN_ROLE, UNUSABLE_FLAG, BadRecordError

_ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}  # roles of chat templates
_ALIASES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
    "tool_response": "tool", "tool_call": "assistant",
}  # fmt: skip
_TOOLS = {"tool", "function", "ipython"}  # roles whose content may be an object
_CALLING_ROLES = ("function_call", "tool_call")  # ShareGPT's, ms-swift's: the content is a call, as JSON
# Keys that say whether a message is learned: OpenAI's, axolotl's, ms-swift's, and those of verl and others.
_FLAGS = (
    "weight", "train", "training", "train_detail", "loss", "loss_scale", "trainable", "loss_mask",
)  # fmt: skip
UNREADABLE_CALL = "a call of a function that cannot be read as one, left out"


def text_parts(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message's content, which may be a list of parts, null or absent."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if _is_text(part)] if isinstance(content, list) else []


def is_learned(message: Mapping[str, Any]) -> bool:
    """Return whether the message is the assistant's and no flag of the message excludes it from learning."""
    return message["role"] == "assistant" and all(message.get(flag) is None or message[flag] for flag in _FLAGS)


def read_list(value: object, field: str, where: str) -> list[Any]:
    """Return a list, decoded from JSON if the field holds text; empty if the field is null or blank."""
    if isinstance(value, str) and value.strip():
        try:
            value = decode_json(value)
        except ValueError as error:
            raise BadRecordError(
                f"field {field!r} holds text that is not JSON ({error}): name it otherwise if it is for no template",
                where,
            ) from error
    if not value or isinstance(value, str):
        return []
    if not isinstance(value, list):
        raise BadRecordError(f"field {field!r} holds {type(value).__name__}, not a list", where)
    return value


def read_messages(value: object, field: str, where: str, plain: str | None = None) -> list[dict[str, Any]]:
    """Return the messages in a field. `plain` is the role of a field that holds one text instead of messages."""
    if isinstance(value, str) and plain is not None:
        return [{"role": plain, "content": value}]
    if isinstance(value, str) and not value.strip():
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):  # tables often hold it as JSON
        value = read_list(value, field, where)
    if not isinstance(value, list):
        raise BadRecordError(f"field {field!r} holds {type(value).__name__}, not a list of messages", where)
    return [read_message(message, field, where) for message in value]


def read_message(message: object, field: str, where: str) -> dict[str, Any]:
    """Return the message unchanged but for names: `from` becomes `role`, `value` becomes `content`."""
    role = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str):
        raise BadRecordError(
            f"field {field!r} is a list, but not one of messages with `role` and `content`", where, NO_MESSAGES
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
    if known_role not in _TOOLS:
        _check_content(parts.get("content"), where)
    _check_flags(parts, where)
    if role.lower() in _CALLING_ROLES:
        return {**parts, "content": "", "tool_calls": _calls_in("".join(text_parts(parts)))}
    if isinstance(called := parts.get("tool_calls"), str):  # tables often hold it as JSON
        parts["tool_calls"] = _calls_in(called) if called.strip() else None
    return parts


def _check_content(content: object, where: str) -> None:
    texts = content if isinstance(content, list) else []
    if not (content is None or (isinstance(content, (str, list)) and all(map(_is_text, texts)))):
        raise BadRecordError(
            "a message's `content` must be text, or a list of parts of type `text`", where, NO_TEXT_CONTENT
        )


def _check_flags(message: Mapping[str, Any], where: str) -> None:
    for flag in _FLAGS:
        value = message.get(flag)
        if value is not None and (not isinstance(value, (bool, int, float)) or value not in (0, 1)):
            raise BadRecordError(
                f"a message's `{flag}` is {value!r}: an answer is learned or not. Write 1 or 0, or true or false",
                where,
                UNUSABLE_FLAG,
            )
        if value and flag != "weight" and message["role"] != "assistant":
            raise BadRecordError(
                f"a message of role {message['role']!r} has `{flag}`: {value!r}, but answers of the assistant alone are"
                " learned. Take the key away",
                where,
                UNUSABLE_FLAG,
            )


def _calls_in(text: str) -> list[Any]:
    """Return the calls that `text` holds as JSON; text that is no call stays, so that the record is left out."""
    try:
        value = decode_json(text)
    except ValueError:
        value = text
    listed = value if isinstance(value, list) else [value]
    return [call if not _is_named(call) else {"type": "function", "function": call} for call in listed]


def calls_of(message: Mapping[str, Any]) -> Iterator[Any]:
    called = message.get("tool_calls") or []
    yield from called if isinstance(called, list) else [None]
    if message.get("function_call"):
        yield message["function_call"]


def is_call(call: object) -> bool:
    return _is_named(call.get("function", call)) if isinstance(call, dict) else False


def _is_named(function: object) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
