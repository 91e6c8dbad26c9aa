"""Render chats with the chat template of a tokenizer.

Templates differ in the messages that they accept. If a template fails, the chat is rendered in another form, for
example with an empty `content` instead of a missing one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any, Self

from aliquot.core.decode import decode_json
from aliquot.core.errors import TokenizerError
from aliquot.core.template_process import TemplateFailure, in_template_process, render_chat
from aliquot.data.chat_messages import functions_of, text_parts

Messages = list[dict[str, Any]]
Span = tuple[int, int]

CHANGED = "a record that the chat template accepts only"
_GENERATION_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")
_CLOCK = "strftime_now"
_RESERVED = {
    "conversations", "messages", "tools", "times", "chat_template", "add_generation_prompt", "continue_final_message",
    "return_assistant_tokens_mask",
}  # fmt: skip
# Prepended to a template. Jinja drops the newline after a block (trim_blocks), so that it adds nothing to the text.
_FIXED_CLOCK = "{% macro strftime_now(format) %}{{ times[format] }}{% endmacro %}\n"
_MARKS = "\ue000\ue001"  # private-use characters, put around special tokens that the author spelled out


class LeftOut(Exception):
    """Raised for a record that is left out. Records are counted by `reason`; `detail` describes this record."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, " ".join(detail.split())


@dataclass(frozen=True)
class TokenizerFacts:
    """The facts of a tokenizer that determine the text of records, for the template process."""

    chat_template: str | dict[str, str] | None  # one template, or several by name
    variables: dict[str, str]  # the special tokens that templates write, by name
    special: tuple[str, ...]  # all special tokens
    is_fast: bool  # whether it can encode special tokens as text

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Return the facts of a transformers tokenizer."""
        special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        return cls(tokenizer.chat_template, tokenizer.special_tokens_map, special, tokenizer.is_fast)

    def template_for(self, tools: list[Any] | None) -> str:
        """Return the template for a chat with these tools. Raises TokenizerError if there is no default."""
        named = self.chat_template if isinstance(self.chat_template, dict) else {"default": self.chat_template or ""}
        source = named.get("default") if tools is None else named.get("tool_use", named.get("default"))
        if source is None:
            raise TokenizerError(
                f"no chat template is the tokenizer's default: its templates are {', '.join(sorted(named))}. Set"
                " data.chat_template"
            )
        return source

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """A pattern that matches any special token, and prefers longer matches."""
        return re.compile("|".join(map(re.escape, sorted(self.special, key=len, reverse=True))) or "(?!)")


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, for the tools and template variables of one record."""

    tokenizer: TokenizerFacts
    source: str  # the template in Jinja
    tools: list[Any] | None
    values: dict[str, Any]  # the record's values for variables of the template
    times: dict[str, str]  # strftime format in the template -> the day in this format; empty if it writes no date

    @classmethod
    def of(cls, tokenizer: TokenizerFacts, record: Mapping[str, Any], day: str | None = None) -> ChatTemplate:
        """Return the tokenizer's chat template for the `tools` and `chat_template_kwargs` of a record.

        `day` (ISO 8601) is the date that the template writes as today. Raises TokenizerError if the tokenizer has
        several templates and no default. Raises LeftOut if the record sets a variable that aliquot sets.
        """
        tools, values = record.get("tools"), record.get("chat_template_kwargs", {})
        if reserved := _RESERVED & values.keys():
            raise LeftOut(
                "a record whose chat_template_kwargs set a variable that aliquot sets, left out", min(reserved)
            )
        source = tokenizer.template_for(tools)
        if day is None or not writes_date(source):
            return cls(tokenizer, source, tools, values, {})
        quoted = (text for line in source.split("\n") for quote in "\"'" for text in line.split(quote)[1:-1])
        times = {text: datetime.fromisoformat(day).strftime(text) for text in quoted if "%" in text}
        return cls(tokenizer, _FIXED_CLOCK + source, tools, values, times)

    @property
    def is_marked(self) -> bool:
        """Whether the template marks the text that the assistant generates."""
        return _GENERATION_MARKER.search(self.source) is not None

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """Return the text of `messages`; if `prompt` is true, with a generation prompt at its end."""
        return self.render_marked(messages, add_generation_prompt=prompt)[0]

    def render_marked(self, messages: Messages, **options: bool) -> tuple[str, list[Span]]:
        """Return the text of `messages`, and the spans inside {% generation %} blocks of the template.

        `options` are those of transformers' `apply_chat_template`; return_assistant_tokens_mask asks for the spans. The
        token mask that transformers computes is not used, because it is wrong if a tokenizer's offsets exclude the
        space before a word.
        """
        variables = {"times": self.times, **self.tokenizer.variables, **self.values}
        text, marks = in_template_process(render_chat, self.source, messages, self.tools, variables, options)
        return text, marks

    def attempt(self, messages: Messages, prompt: bool = False) -> str | None:
        """Return the text of `messages`; None if the template raises an error for them."""
        try:
            return self.render(messages, prompt)
        except TemplateFailure:
            return None

    def stretches_as_text(self, text: str, messages: Messages) -> list[Span]:
        """Return the spans of `text`, which begins with the rendering of `messages`, to encode as ordinary text.

        Such a span lies between special tokens of the template, and holds a special token that the author spelled out.
        """
        special = self.tokenizer.special_pattern

        def marked(value: Any) -> Any:
            as_json = json.dumps(value, ensure_ascii=False)
            return json.loads(special.sub(f"{_MARKS[0]}\\g<0>{_MARKS[1]}", as_json))

        marked_template = replace(self, tools=marked(self.tools), values=marked(self.values))
        marked_text = marked_template.attempt(marked(messages)) or ""
        rendered = re.sub(f"[{_MARKS}]", "", marked_text)
        if not rendered or not text.startswith(rendered):
            raise LeftOut(
                "a record of which the chat template changes the special tokens in its texts, left out: see"
                " data.special_tokens_in_text"
            )
        marks = enumerate(re.finditer(f"[{_MARKS}]", marked_text))
        authors = [mark.start() - marks_before for marks_before, mark in marks if mark[0] == _MARKS[0]]
        bounds = [0, len(text)]
        for match in special.finditer(text):
            bounds[-1:-1] = [] if match.start() in authors else match.span()
        edges = zip(bounds[::2], bounds[1::2], strict=True)
        return [(start, stop) for start, stop in edges if any(start <= author < stop for author in authors)]


def writes_date(source: str | dict[str, str]) -> bool:
    """Return whether a chat template writes a date; for a dict of named templates, whether any of them does."""
    return any(_CLOCK in template for template in ([source] if isinstance(source, str) else source.values()))


def fit_messages(template: ChatTemplate, messages: Messages) -> tuple[Messages, str | None]:
    """Return the messages in a form that the template accepts, and a description of the changes.

    The description is None for the form that transformers documents for `tokenizer.apply_chat_template`. Raises
    LeftOut, with the error of the template if there is one, if the template accepts no form.
    """
    error: TemplateFailure | None = None
    for changes, form in _forms(messages):
        try:
            text = template.render(form)
        except TemplateFailure as raised:
            error = error or raised
            continue
        if not _is_python(form, text):
            return form, f"{CHANGED} with {' and '.join(changes)}" if changes else None
    if error is not None:
        raise LeftOut("a record that the chat template fails on, left out", str(error))
    raise LeftOut("a record of which the chat template writes lists or objects as Python does, left out")


def _forms(messages: Messages) -> Iterator[tuple[list[str], Messages]]:
    """Yield (changes, messages) to try: first the messages without nulls, then forms with more and more changes.

    Arguments of calls are objects, as transformers and vLLM pass them, even if the record holds them as JSON text: most
    templates would quote this text a second time. A template that accepts text alone gets the text of the record.
    """
    recorded = [{key: part for key, part in message.items() if part is not None} for message in messages]
    objects, texts = ([_with_arguments(message, form) for message in recorded] for form in (_as_object, _as_text))
    bases: list[tuple[list[str], Messages]] = [([], objects)]
    if texts != objects:
        bases.append(([] if texts == recorded else ["arguments as JSON text"], texts))
    contents = [None, ("a `content` of null", _with_default(None)), ("an empty `content`", _with_default(""))]
    shapes = [None, ("a `content` as one text", _one_text), ("texts as parts of a `content`", _in_parts)]
    choices = product(contents, shapes, bases)
    for *chosen, (changes, form) in sorted(choices, key=lambda choice: len(choice[-1][0]) - choice.count(None)):
        effective = len(changes) + len(chosen) - chosen.count(None)  # the number of changes if each has an effect
        for name, change in filter(None, chosen):
            changed = [change(message) for message in form]
            changes, form = ([*changes, name] if changed != form else changes), changed
        if len(changes) == effective:
            yield changes, form


def _with_default(content: str | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda message: {"content": content, **message}


def _one_text(message: dict[str, Any]) -> dict[str, Any]:
    content, texts = message.get("content"), text_parts(message)
    if not isinstance(content, (list, dict)):
        return message
    joined = isinstance(content, list) and len(texts) == len(content)
    return {**message, "content": "".join(texts) if joined else json.dumps(content, ensure_ascii=False)}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _as_object(arguments: Any) -> Any:
    try:
        value = decode_json(arguments)
    except (AttributeError, ValueError):  # AttributeError: not text
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _with_arguments(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    def changed(call: Any) -> Any:
        if "function" in call:
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [changed(call) for call in calls]} if isinstance(calls, list) else message


def _is_python(messages: Messages, text: str) -> bool:
    """Return whether `text` holds parts of a content, or arguments of a call, in Python notation instead of JSON."""
    functions = [function for message in messages for function in functions_of(message)]
    values = [message.get("content") for message in messages] + [function.get("arguments") for function in functions]
    shown = [(str(value), value) for value in values if isinstance(value, (list, dict))]
    return any(form in text and form != json.dumps(value, ensure_ascii=False) for form, value in shown)
