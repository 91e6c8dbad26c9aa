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
_REASONING = ("reasoning_content", "thinking", "reasoning")  # as transformers knows them


def of_turns(marks: list[Span], turns: int) -> list[Span] | None:
    """A mark for each of the assistant's `turns`; None where there are more or fewer."""
    if len(marks) == turns:
        return marks
    joined: list[Span] = []  # the end of the text may have a mark of its own behind the last answer's
    for start, stop in marks:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined if len(joined) == turns else None


def rendered_spans(template: ChatTemplate, messages: Messages, whole: str, turns: list[int]) -> list[Span]:
    """Where each of the assistant's `turns` stands in the whole text: from behind the prompt for it to where the next
    message begins. Raises LeftOut where that cannot be told."""
    return [_span(template, messages, whole, index) for index in turns]


def _span(template: ChatTemplate, messages: Messages, whole: str, index: int) -> Span:
    start = _start(template, messages, whole, index)
    if start is not None:
        end = next((end for end in _ends(template, messages, whole, index + 1) if end > start), None)
        if end is not None:
            return start, end
    if _otherwise(template, messages, index) == whole:  # the template writes none of its words
        return 0, 0
    raise LeftOut(
        "a record in which it is not known where answers begin or end, because the chat template renders earlier turns"
        " differently once later ones are there, left out: give one that marks answers with {% generation %},"
        " data.chat_template"
    )


def _start(template: ChatTemplate, messages: Messages, whole: str, index: int) -> int | None:
    """Where the answer begins: behind the prompt for it, or as much of the prompt as is there, since one may open a
    thought that the answer has not (DeepSeek-R1's, Qwen3's that always think); else where its words begin."""
    asked = template.attempt(messages[:index], prompt=True) if index else None
    if asked is not None and whole.startswith(asked):
        return len(asked)
    words = _words(template, messages, whole, index)
    if words is None:
        return None
    before = (_words(template, messages, whole, earlier) for earlier in range(index - 1, -1, -1))
    low = next((found[1] for found in before if found is not None), 0)
    header, prompt = whole[low : words[0]], _prompt(template)
    shared = next((count for count in range(len(prompt), len(prompt) // 2, -1) if prompt[:count] in header), 0)
    return low + header.rindex(prompt[:shared]) + shared if shared else words[0]


def _words(template: ChatTemplate, messages: Messages, whole: str, index: int) -> Span | None:
    """From where to where the text changes if the message is in other words; None where it does not."""
    other = _otherwise(template, messages, index)
    if other is None or other == whole:
        return None
    start = _common(whole, other)
    return start, len(whole) - min(_common(whole[::-1], other[::-1]), len(whole) - start, len(other) - start)


def _otherwise(template: ChatTemplate, messages: Messages, index: int) -> str | None:
    return template.attempt([*messages[:index], in_other_words(messages[index]), *messages[index + 1 :]])


def _common(one: str, other: str) -> int:
    """How many letters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _ends(template: ChatTemplate, messages: Messages, whole: str, count: int) -> Iterator[int]:
    """Where the first `count` messages, the last of which is an answer, may end in the whole text."""
    if count == len(messages):
        yield len(whole)
        return
    yield from (len(text) for text in _beginnings(template, messages[:count]) if whole.startswith(text))
    # Some leave out the thoughts of a call once there is an answer (gpt-oss's), but not what the next message adds.
    alone, more = template.attempt(messages[:count]), template.attempt(messages[: count + 1])
    other = _otherwise(template, messages[: count + 1], count)
    words = _words(template, messages, whole, count)
    if alone is not None and more is not None and other is not None and words is not None and more.startswith(alone):
        header = more[len(alone) : _common(more, other)]
        if whole[: words[0]].endswith(header):
            yield words[0] - len(header)


def _beginnings(template: ChatTemplate, messages: Messages) -> Iterator[str]:
    """What `messages`, of which the last is an answer, may be rendered as at the begin of a longer chat.

    Some templates end the whole with a token of its own unless they ask for an answer (Phi-3's); some render the last
    answer otherwise than those before a later question (Qwen3's).
    """
    alone, asked = template.attempt(messages), template.attempt(messages, prompt=True)
    yield from filter(None, [alone])
    prompt = _prompt(template)
    if asked is not None and prompt and asked.endswith(prompt):
        yield asked.removesuffix(prompt)
    once = template.attempt([*messages, _QUESTION])
    # A question behind a question, or, where roles alternate, behind an answer to it.
    for between in ([_QUESTION], [_QUESTION, _ANSWER]):
        before, behind = (template.attempt([*messages, *between, *more]) for more in ([], [_QUESTION]))
        if once is None or before is None or behind is None or not behind.startswith(before):
            continue
        question = behind.removeprefix(before)
        if question and once.endswith(question):
            yield once.removesuffix(question)


def _prompt(template: ChatTemplate) -> str:
    """What asks for an answer; empty where nothing does, or where it cannot be told apart."""
    bare, asked = template.attempt([_QUESTION]), template.attempt([_QUESTION], prompt=True)
    if bare is None or asked is None:
        return ""
    if not asked.startswith(bare):
        bare = bare.removesuffix(template.tokenizer.eos_token or "")
    return asked[len(bare) :] if asked.startswith(bare) else ""


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
