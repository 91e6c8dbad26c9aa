"""Which of a chat's words are in the text that a template made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from aliquot.data.formats import text_parts

_REASONING = ("reasoning_content", "thinking", "reasoning")  # as transformers knows them


def leaves_out(messages: list[dict[str, Any]], tools: list[Any], rendered: str) -> bool:
    """Whether words of `messages`, functions that they call, or the name of one of `tools` are not in `rendered`.

    The messages follow each other there, so that what an earlier one says does not count for a later one; but a system
    message may stand anywhere.
    """
    at = 0
    for message in messages:
        anywhere = message["role"] in ("system", "developer")
        ends = [
            _end(said, rendered, 0 if anywhere else at)
            for said in (text_parts(message), [_reasoning(message)], calls(message))
        ]
        if -1 in ends:
            return True
        at = at if anywhere else max(ends)
    return any(_function(tool, "function") not in rendered for tool in tools)


def is_silent(message: dict[str, Any], rendered: str, without_special: Callable[[str], str]) -> bool:
    """Whether no word of all that `message` says is in `rendered`, its own text; special tokens are no words."""
    said, own = (
        [*text_parts(message), _reasoning(message), *calls(message), *_arguments(message)],
        without_special(rendered),
    )
    words = (without_special(word) for text in said for word in text.split())
    return not any(form in own for word in words for form in _forms(word))


def calls(message: dict[str, Any]) -> list[str]:
    """Names of the functions that `message` calls, as `tool_calls` or as OpenAI's older `function_call`."""
    listed = message.get("tool_calls")
    named = [_function(call, "function") for call in listed] if isinstance(listed, list) else []
    return [name for name in [*named, _function(message, "function_call")] if name]


def has_words(message: dict[str, Any]) -> bool:
    return bool("".join(text_parts(message)).strip() or _reasoning(message).strip() or calls(message))


def in_other_words(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with another beginning of whatever it says, and nothing said that it does not say."""

    def other(text: Any) -> Any:
        return ("y" if text.lstrip().startswith("x") else "x") if isinstance(text, str) and text.strip() else text

    def other_call(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        changed = {"function": other_call(call["function"])} if "function" in call else {"name": other(call["name"])}
        return {**call, **changed}

    changed = {key: other(message[key]) for key in ("content", *_REASONING) if key in message}
    if isinstance(message.get("content"), list):
        changed["content"] = [
            {**part, "text": other(part["text"])} if isinstance(part, dict) and "text" in part else part
            for part in message["content"]
        ]
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [other_call(call) for call in message["tool_calls"]]
    return {**message, **changed}


def _end(said: list[str], rendered: str, start: int) -> int:
    """Where the last of `said` ends in `rendered`, each behind the one before it; -1 where one is not there."""
    for text in said:
        found = next((at + len(form) for form in _forms(text.strip()) if (at := rendered.find(form, start)) >= 0), -1)
        if found < 0:
            return -1
        start = found
    return start


def _forms(text: str) -> Iterator[str]:
    """How a template may write it: some write what a tool has answered as JSON."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


def _reasoning(message: dict[str, Any]) -> str:
    return next((message[key] for key in _REASONING if isinstance(message.get(key), str)), "")


def _arguments(message: dict[str, Any]) -> Iterator[str]:
    """Texts in the arguments of the functions that `message` calls."""
    listed = message.get("tool_calls")
    waiting = [call.get("function", call).get("arguments") for call in listed] if isinstance(listed, list) else []
    while waiting:
        value = waiting.pop()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        if not isinstance(value, (dict, list)):
            yield str(value)


def _function(value: Any, key: str) -> str:
    """The name of a function as OpenAI's and as plain schemas have it; empty where neither does."""
    function = value.get(key, value) if isinstance(value, dict) else {}
    if function is value and key == "function_call":  # a message may have a name, too
        return ""
    return str(function.get("name", "")) if isinstance(function, dict) else ""
