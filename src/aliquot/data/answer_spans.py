"""Where in a rendered chat the assistant's answers stand, in characters: by the template's own marks, or by rendering
beginnings of the chat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from aliquot.errors import TokenizerError

Messages = list[dict[str, Any]]
Span = tuple[int, int]

_GENERATION_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")
_PROBE = {"role": "user", "content": "x"}


def render(tokenizer: Any, messages: Messages, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def is_marked(tokenizer: Any) -> bool:
    """Whether the template says what the assistant generates."""
    return _GENERATION_MARKER.search(tokenizer.get_chat_template()) is not None


def render_marked(tokenizer: Any, messages: Messages, tools: list[Any] | None) -> tuple[str, list[Span]]:
    """The whole text, and the stretches of it that the template marks.

    Not transformers' own mask of tokens: it goes wrong where a tokenizer's offsets leave out the space before a word.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, marks = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return rendered[0], marks[0]


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


def rendered_spans(
    tokenizer: Any, messages: Messages, whole: str, turns: list[int], options: dict[str, Any], name: str
) -> list[Span]:
    """Where each of the assistant's `turns` stands in the whole text: what rendering one message more adds to it after
    the prompt for it. Raises TokenizerError, naming the chat `name`, where that cannot be told."""
    spans = (_span(tokenizer, messages, whole, index, options) for index in turns)
    found = [span for span in spans if span is not None]
    if len(found) < len(turns):
        raise TokenizerError(
            "the chat template renders earlier turns differently once later ones are there, so that where answers end"
            " is not known: give one that marks them with {% generation %}, data.chat_template",
            name,
        )
    return found


def _span(tokenizer: Any, messages: Messages, whole: str, index: int, options: dict[str, Any]) -> Span | None:
    after = render(tokenizer, messages[: index + 1], **options)
    if index == 0:  # there is no conversation to render before it
        start = _first_start(tokenizer, messages, whole, options)
        if start is None or whole.startswith(after):
            return None if start is None else (start, len(after))
    else:
        asked = render(tokenizer, messages[:index], add_generation_prompt=True, **options)
        before = render(tokenizer, messages[:index], **options)
        if whole.startswith(after) and after.startswith(asked):
            return len(asked), len(after)
        header = _header(tokenizer, messages, whole, index, asked, options)
        if whole.startswith(after) and after.startswith(before):
            return max(len(before), header), len(after)
        opened = whole.startswith(before) and header > len(before)
        if not whole.startswith(asked) and not opened:
            return None
        start = len(asked) if whole.startswith(asked) else header
    ends = (len(text) for text in _ended(tokenizer, messages[: index + 1], after, options) if whole.startswith(text))
    return next(((start, end) for end in ends if end > start), None)


def _header(tokenizer: Any, messages: Messages, whole: str, index: int, asked: str, options: dict[str, Any]) -> int:
    """Where the prompt for an answer and the whole text part: a prompt may open a thought that the answer has not
    (DeepSeek-R1's, Qwen3's that always think). At most to where other words of the answer would change the text."""
    others = [*messages[:index], _in_other_words(messages[index]), *messages[index + 1 :]]
    texts = (asked, whole, render(tokenizer, others, **options))
    parted = (at for at, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1)
    return next(parted, min(map(len, texts)))


def _in_other_words(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": "y" if str(message.get("content") or "").lstrip().startswith("x") else "x"}


def _ended(tokenizer: Any, messages: Messages, after: str, options: dict[str, Any]) -> Iterator[str]:
    """What `messages` may be rendered as at the begin of a longer chat, `after` being what they are alone.

    Some templates end the whole with a token of its own unless they ask for an answer (Phi-3's); some render the last
    answer otherwise than those before a later question (Qwen3's).
    """
    yield after
    asked, prompt = render(tokenizer, messages, add_generation_prompt=True, **options), _prompt(tokenizer, options)
    if prompt and asked.endswith(prompt):
        yield asked.removesuffix(prompt)
    from jinja2 import TemplateError

    try:
        once = render(tokenizer, [*messages, _PROBE], **options)
        twice = render(tokenizer, [*messages, _PROBE, _PROBE], **options)
    except TemplateError:  # it insists on an order of roles
        return
    question = twice.removeprefix(once)
    if question != twice and once.endswith(question):
        yield once.removesuffix(question)


def _first_start(tokenizer: Any, messages: Messages, whole: str, options: dict[str, Any]) -> int | None:
    """Where the answer that begins the chat does: other words there would change the text from there on."""
    changed = render(tokenizer, [_in_other_words(messages[0]), *messages[1:]], **options)
    same = next((at for at, pair in enumerate(zip(whole, changed, strict=False)) if pair[0] != pair[1]), None)
    header, prompt = whole[:same], _prompt(tokenizer, options)
    if not prompt:
        return len(header)
    return header.rindex(prompt) + len(prompt) if prompt in header else None


def _prompt(tokenizer: Any, options: dict[str, Any]) -> str:
    """What asks for an answer; empty where nothing does, or where it cannot be told apart."""
    bare = render(tokenizer, [_PROBE], **options)
    asked = render(tokenizer, [_PROBE], add_generation_prompt=True, **options)
    if not asked.startswith(bare):
        bare = bare.removesuffix(tokenizer.eos_token or "")
    return asked[len(bare) :] if asked.startswith(bare) else ""
