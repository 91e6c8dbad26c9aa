"""Find the assistant's answers: their place in the text that a chat template wrote.

Places are in characters: by the template's own marks, or by rendering beginnings and other wordings of the chat.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from aliquot.data.chat_messages import text_parts
from aliquot.data.chat_template import ChatTemplate, LeftOut, Messages, Span

_QUESTION: dict[str, Any] = {"role": "user", "content": "x"}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "x"}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of thoughts that transformers knows

UNKNOWN_PLACE = (
    "a record with answers of unknown place, because the chat template renders earlier turns differently once later"
    " turns follow, left out: set data.chat_template to a template that marks answers with {% generation %}"
)


def marks_of_turns(marks: list[Span], turns: int) -> list[Span] | None:
    """Return one mark for each of the assistant's `turns`; None if there are more or fewer marks than turns."""
    if len(marks) == turns:
        return marks
    joined: list[Span] = []  # a template may mark the end of the text separately from the last answer
    for start, stop in marks:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined if len(joined) == turns else None


def rendered_spans(template: ChatTemplate, messages: Messages, whole: str, turns: list[int]) -> list[Span]:
    """Return the place of each of the assistant's `turns` in the whole text.

    An answer begins after the prompt for it and ends where the next message begins. Raises LeftOut if a place is
    ambiguous.
    """
    return [_span(template, messages, whole, index) for index in turns]


def _span(template: ChatTemplate, messages: Messages, whole: str, index: int) -> Span:
    start = _start(template, messages, whole, index)
    if start is not None:
        end = next((end for end in _ends(template, messages, whole, index + 1) if end > start), None)
        if end is not None:
            return start, end
    if _render_reworded(template, messages, index) == whole:  # the template writes no word of the message
        return 0, 0
    raise LeftOut(UNKNOWN_PLACE)


def _start(template: ChatTemplate, messages: Messages, whole: str, index: int) -> int | None:
    """Return where the answer begins: after the prompt for it, else where its words begin.

    A prompt may open a thought that the answer lacks (DeepSeek-R1, Qwen3 models that always think): then the answer
    begins after the part of the prompt that the text contains.
    """
    asked = template.attempt(messages[:index], prompt=True) if index else None
    if asked is not None and whole.startswith(asked):
        return len(asked)
    words = _words(template, messages, whole, index)
    if words is None:
        return None
    before = (_words(template, messages, whole, earlier) for earlier in range(index - 1, -1, -1))
    low = next((span[1] for span in before if span is not None), 0)
    header, prompt = whole[low : words[0]], _prompt(template)
    shared = next((count for count in range(len(prompt), len(prompt) // 2, -1) if prompt[:count] in header), 0)
    return low + header.rindex(prompt[:shared]) + shared if shared else words[0]


def _words(template: ChatTemplate, messages: Messages, whole: str, index: int) -> Span | None:
    """Return the span of the text that changes if the message is reworded; None if the text stays the same."""
    reworded = _render_reworded(template, messages, index)
    if reworded is None or reworded == whole:
        return None
    start = _common_length(whole, reworded)
    return start, len(whole) - min(
        _common_length(whole[::-1], reworded[::-1]), len(whole) - start, len(reworded) - start
    )


def _render_reworded(template: ChatTemplate, messages: Messages, index: int) -> str | None:
    return template.attempt([*messages[:index], in_other_words(messages[index]), *messages[index + 1 :]])


def _common_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def _ends(template: ChatTemplate, messages: Messages, whole: str, count: int) -> Iterator[int]:
    """Yield places where the first `count` messages, the last of which is an answer, may end in the whole text."""
    if count == len(messages):
        yield len(whole)
        return
    yield from (len(text) for text in _beginnings(template, messages[:count]) if whole.startswith(text))
    # Some templates leave out the thoughts of a call once its answer follows (gpt-oss); the header of the next message
    # still shows where the call ends.
    rendered, continued = template.attempt(messages[:count]), template.attempt(messages[: count + 1])
    reworded = _render_reworded(template, messages[: count + 1], count)
    words = _words(template, messages, whole, count)
    if (
        rendered is not None
        and continued is not None
        and reworded is not None
        and words is not None
        and continued.startswith(rendered)
    ):
        header = continued[len(rendered) : _common_length(continued, reworded)]
        if whole[: words[0]].endswith(header):
            yield words[0] - len(header)


def _beginnings(template: ChatTemplate, messages: Messages) -> Iterator[str]:
    """Yield possible renderings of `messages`, the last of which is an answer, as the beginning of a longer chat.

    Some templates end a chat with a special token unless they ask for an answer (Phi-3). Some templates render the last
    answer differently from answers before a later question (Qwen3).
    """
    rendered, asked = template.attempt(messages), template.attempt(messages, prompt=True)
    yield from filter(None, [rendered])
    prompt = _prompt(template)
    if asked is not None and prompt and asked.endswith(prompt):
        yield asked.removesuffix(prompt)
    questioned = template.attempt([*messages, _QUESTION])
    # A question after a question or, if roles must alternate, after an answer to that question.
    for inserted in ([_QUESTION], [_QUESTION, _ANSWER]):
        before, after = (template.attempt([*messages, *inserted, *further]) for further in ([], [_QUESTION]))
        if questioned is None or before is None or after is None or not after.startswith(before):
            continue
        question = after.removeprefix(before)
        if question and questioned.endswith(question):
            yield questioned.removesuffix(question)


def _prompt(template: ChatTemplate) -> str:
    """Return the text that asks for an answer; empty if the template has none or if it cannot be separated."""
    bare, asked = template.attempt([_QUESTION]), template.attempt([_QUESTION], prompt=True)
    if bare is None or asked is None:
        return ""
    if not asked.startswith(bare):
        bare = bare.removesuffix(template.tokenizer.eos_token or "")
    return asked[len(bare) :] if asked.startswith(bare) else ""


def leaves_out(messages: list[dict[str, Any]], tools: list[Any], rendered: str) -> bool:
    """Return whether words of `messages`, functions that they call, or names of `tools` are missing in `rendered`.

    Messages must follow each other in `rendered`, so that the words of an earlier message do not count for a later
    message. A system message may stand anywhere.
    """
    at = 0
    for message in messages:
        anywhere = message["role"] in ("system", "developer")
        ends = [
            _end(texts, rendered, 0 if anywhere else at)
            for texts in (text_parts(message), [_reasoning(message)], calls(message))
        ]
        if -1 in ends:
            return True
        at = at if anywhere else max(ends)
    return any(_function(tool, "function") not in rendered for tool in tools)


def is_silent(message: dict[str, Any], rendered: str, without_special: Callable[[str], str]) -> bool:
    """Return whether `rendered`, the text of `message`, holds no word of the message. Special tokens are not words."""
    texts, words_in_text = (
        [*text_parts(message), _reasoning(message), *calls(message), *_arguments(message)],
        without_special(rendered),
    )
    words = (without_special(word) for text in texts for word in text.split())
    return not any(form in words_in_text for word in words for form in _forms(word))


def calls(message: dict[str, Any]) -> list[str]:
    """Return the names of functions that `message` calls, by `tool_calls` or by OpenAI's older `function_call`."""
    listed = message.get("tool_calls")
    named = [_function(call, "function") for call in listed] if isinstance(listed, list) else []
    return [name for name in [*named, _function(message, "function_call")] if name]


def has_words(message: dict[str, Any]) -> bool:
    return bool("".join(text_parts(message)).strip() or _reasoning(message).strip() or calls(message))


def in_other_words(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with changed first words in each text that it has; empty texts stay empty."""

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


def _end(texts: list[str], rendered: str, start: int) -> int:
    """Return where the last of `texts` ends in `rendered`, if all of them follow each other there; else -1."""
    for text in texts:
        end = next((at + len(form) for form in _forms(text.strip()) if (at := rendered.find(form, start)) >= 0), -1)
        if end < 0:
            return -1
        start = end
    return start


def _forms(text: str) -> Iterator[str]:
    """Yield the ways in which a template may write `text`: some templates write answers of tools as JSON."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


def _reasoning(message: dict[str, Any]) -> str:
    return next((message[key] for key in _REASONING if isinstance(message.get(key), str)), "")


def _arguments(message: dict[str, Any]) -> Iterator[str]:
    """Yield the texts in the arguments of all functions that `message` calls."""
    listed = message.get("tool_calls")
    waiting = [call.get("function", call).get("arguments") for call in listed] if isinstance(listed, list) else []
    while waiting:
        value = waiting.pop()
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        if not isinstance(value, (dict, list)):
            yield str(value)


def _function(value: Any, key: str) -> str:
    """Return the name of a function by OpenAI's schema or a plain schema; empty if neither has a name."""
    function = value.get(key, value) if isinstance(value, dict) else {}
    if function is value and key == "function_call":  # a message may have a name, too
        return ""
    return str(function.get("name", "")) if isinstance(function, dict) else ""
