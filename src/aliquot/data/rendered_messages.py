"""Compare the messages of a chat with the text that a chat template renders: which words of a message are in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from aliquot.data.chat_messages import TRAIN_DETAIL, function_in, functions_of, has_detail, text_parts

_REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a model's reasoning that transformers knows
_TAG = re.compile(r"[<\[◁][^<>\[\]◁▷]*[>\]▷]")  # as around reasoning: <think>, [THINK], ◁think▷


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
    for part in message[TRAIN_DETAIL]:
        start, stop = max(0, at + part["begin_offset"]), min(end, at + part["end_offset"] + 1)
        if part["train"] and start < stop:
            is_learned_here[start:stop] = b"\1" * (stop - start)
    return [run.span() for run in re.finditer(b"\1+", is_learned_here)]


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
    return any(name not in rendered for name in _names(map(function_in, tools)))


def is_silent(message: dict[str, Any], rendered: str, without_special: Callable[[str], str]) -> bool:
    """Return whether `rendered`, the span of `message` in the rendered chat, holds no word of `message`.

    Special tokens are not words, and neither are the tags around reasoning, which a template may write without it. Not
    all languages put spaces between words, so that a text between two tags may be a single word.
    """
    texts = [*text_parts(message), _reasoning(message), *_calls(message), *_arguments(message)]
    parts = [without_special(part) for text in texts for part in (text, *_TAG.sub(" ", text).split())]
    written = _without_spaces(without_special(rendered))
    return not any(spelling in written for part in parts for spelling in _spellings(part) if spelling)


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


def _calls(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions that `message` calls in `tool_calls` or in OpenAI's older `function_call`."""
    return [name for name in _names([*functions_of(message), message.get("function_call")]) if name]


def _names(functions: Iterable[Any]) -> list[str]:
    return [str(function.get("name", "")) if isinstance(function, dict) else "" for function in functions]


def _arguments(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield all values in the arguments of the functions that `message` calls, as text."""
    waiting = [function.get("arguments") for function in functions_of(message)]
    while waiting:
        value = waiting.pop()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        if not isinstance(value, (dict, list)):
            yield str(value)
