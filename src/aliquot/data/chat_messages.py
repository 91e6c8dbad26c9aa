"""Check the messages of a chat (roles, contents, loss flags, tool calls), and whether a rendering omits any."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
_DETAIL = "train_detail"  # as in axolotl, also a list of parts: the indices of their first and last characters
_REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a model's reasoning that transformers knows
# The beginning of messages in JSON or in Python's notation, of which texts like `[{"role": ...` are taken for messages.
_MESSAGES_AS_TEXT = re.compile(
    r"""\s*\[?\s*\{(?=.*["'](?:role|from)["']\s*:)\s*["'](?:role|from|content|value)["']\s*:""", re.S
)
_TAG = re.compile(r"[<\[◁][^<>\[\]◁▷]*[>\]▷]")  # as around reasoning: <think>, [THINK], ◁think▷
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
        if flag == _DETAIL and has_detail(message):
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
    for part in message[_DETAIL]:
        if not _is_part(part):
            raise BadRecordError(
                f"a message's `{_DETAIL}` has {part!r}: a part has begin_offset, end_offset (the index of its last"
                " character) and train (true or false)",
                where,
                UNUSABLE_FLAG,
            )
    if message[_DETAIL] and not isinstance(message.get("content"), str):
        raise BadRecordError(f"a message has `{_DETAIL}`, but its `content` is no text", where, UNUSABLE_FLAG)


def _is_part(part: object) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("train"), bool):
        return False
    begin, end = part.get("begin_offset"), part.get("end_offset")
    return type(begin) is int and type(end) is int and 0 <= begin <= end


def learned_parts(message: Mapping[str, Any], rendered: str) -> list[tuple[int, int]] | None:
    """Return the spans to learn in `rendered`, the text of `message` in the rendered chat; None if they are unknown.

    With a list in `train_detail`, the loss covers its parts with `train: true`, and the end of the answer that the
    template writes after the content. Without one, the loss covers all of `rendered`.
    """
    if not has_detail(message):
        return [(0, len(rendered))]
    content = message["content"]
    at = rendered.find(content)
    if at < 0 and (at := rendered.find(content.strip())) >= 0:  # many templates strip the content
        at -= len(content) - len(content.lstrip())
    elif at < 0:
        return None
    end = at + len(content.rstrip())
    is_learned_here = bytearray(end) + b"\1" * (len(rendered) - end)
    for part in message[_DETAIL]:
        start, stop = max(0, at + part["begin_offset"]), min(end, at + part["end_offset"] + 1)
        if part["train"] and start < stop:
            is_learned_here[start:stop] = b"\1" * (stop - start)
    return [run.span() for run in re.finditer(b"\1+", is_learned_here)]


def has_detail(message: Mapping[str, Any]) -> bool:
    """Return whether `train_detail` lists the parts of a message to learn."""
    return isinstance(message.get(_DETAIL), list)


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
    return all(_is_named(_function(call)) for call in calls)


def functions_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the called functions, with their arguments, in the `tool_calls` of a message."""
    listed = message.get("tool_calls")
    return [_function(call) for call in listed] if isinstance(listed, list) else []


def _function(call: object) -> Any:
    """Return the function in a tool call or tool definition, which OpenAI's schema nests under `function`."""
    return call.get("function", call) if isinstance(call, dict) else None


def _is_named(function: object) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def leaves_out(messages: list[dict[str, Any]], tools: list[Any], rendered: str) -> bool:
    """Return whether `rendered` omits words of `messages`, names of called functions, or names of `tools`.

    Each message is searched after the end of the message before it, because an earlier message may contain the same
    words. A system message may be anywhere.
    """
    at, written = 0, _without_spaces(rendered)
    for message in messages:
        anywhere = message["role"] in ("system", "developer")
        texts = [part for text in text_parts(message) for part in _TAG.split(text)]
        ends = [_end(of, written, 0 if anywhere else at) for of in (texts, [_reasoning(message)], _calls(message))]
        if -1 in ends:
            return True
        at = at if anywhere else max(ends)
    return any(name not in rendered for name in _names(map(_function, tools)))


def is_silent(message: dict[str, Any], rendered: str, without_special: Callable[[str], str]) -> bool:
    """Return whether `rendered`, the span of `message` in the rendered chat, holds no word of `message`.

    Special tokens are not words, and neither are the tags around reasoning, which a template may write without it. Not
    all languages put spaces between words, so that a text between two tags may be a single word.
    """
    texts = [*text_parts(message), _reasoning(message), *_calls(message), *_arguments(message)]
    parts = [without_special(part) for text in texts for part in (text, *_TAG.sub(" ", text).split())]
    written = _without_spaces(without_special(rendered))
    return not any(spelling in written for part in parts for spelling in _spellings(part) if spelling)


def _calls(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions that `message` calls in `tool_calls` or in OpenAI's older `function_call`."""
    return [name for name in _names([*functions_of(message), message.get("function_call")]) if name]


def _names(functions: Iterable[Any]) -> list[str]:
    return [str(function.get("name", "")) if isinstance(function, dict) else "" for function in functions]


def has_words(message: Mapping[str, Any]) -> bool:
    """Return whether a message has text, reasoning or tool calls."""
    return bool("".join(text_parts(message)).strip() or _reasoning(message).strip() or _calls(message))


def in_other_words(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with each text replaced by a single letter; empty texts stay empty.

    A rendering with these texts shows where the template puts the message. The letter differs from the first letter of
    the text that it replaces.
    """

    def reworded(text: Any) -> Any:
        return ("y" if text.lstrip().startswith("x") else "x") if isinstance(text, str) and text.strip() else text

    def reworded_call(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        changed = (
            {"function": reworded_call(call["function"])} if "function" in call else {"name": reworded(call["name"])}
        )
        return {**call, **changed}

    changed = {key: reworded(message[key]) for key in ("content", *_REASONING) if key in message}
    if isinstance(message.get("content"), list):
        changed["content"] = [
            {**part, "text": reworded(part["text"])} if isinstance(part, dict) and "text" in part else part
            for part in message["content"]
        ]
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [reworded_call(call) for call in message["tool_calls"]]
    return {**message, **changed}


def _end(texts: list[str], written: str, start: int) -> int:
    """Return the index at which the last of `texts` ends, if `written` has all of them in order; else -1.

    `written` is a rendered chat without white space, because a template may write other white space than the message.
    """
    for text in texts:
        places = ((written.find(spelling, start), spelling) for spelling in _spellings(text.strip()))
        start = next((at + len(spelling) for at, spelling in places if at >= 0), -1)
        if start < 0:
            return -1
    return start


def _spellings(text: str) -> Iterator[str]:
    """Return, without white space, the ways in which a template may write `text`: some write tools' replies as JSON."""
    return map(_without_spaces, (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]))


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _reasoning(message: Mapping[str, Any]) -> str:
    return next((message[key] for key in _REASONING if isinstance(message.get(key), str)), "")


def _arguments(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield all values in the arguments of the functions that `message` calls, as text."""
    waiting = [function.get("arguments") for function in functions_of(message)]
    while waiting:
        value = waiting.pop()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        if not isinstance(value, (dict, list)):
            yield str(value)
