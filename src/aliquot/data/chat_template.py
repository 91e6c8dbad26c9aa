"""A chat as its template writes it: the record as it is, and another wording of it only where the template fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Any

from aliquot.core.decode import decode_json
from aliquot.core.errors import TokenizerError, UserError
from aliquot.data.chat_messages import text_parts
from aliquot.models.bounded_rendering import bounded_rendering

Messages = list[dict[str, Any]]
Span = tuple[int, int]

CHANGED = "a record that the chat template does not take as it is, given to it"
_GENERATION_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")
_CLOCK = "strftime_now"
_TIME_FORMAT = re.compile(r"""(["'])((?:(?!\1).)*%(?:(?!\1).)*)\1""")
# The newline goes: behind a block it is no text (trim_blocks), and the template begins on a line of its own.
_FIXED_CLOCK = "{% macro strftime_now(format) %}{{ times[format] }}{% endmacro %}\n"


class LeftOut(Exception):
    """A record that is not learned: `reason`, the same words for all of its kind, and `detail`, of this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, " ".join(detail.split())


@dataclass(frozen=True)
class ChatTemplate:
    tokenizer: Any  # of transformers
    source: str  # in Jinja
    tools: list[Any] | None
    times: dict[str, str]  # what the template's clock shows, by format; empty where it asks for none

    @classmethod
    def of(cls, tokenizer: Any, tools: list[Any] | None = None, day: str | None = None) -> ChatTemplate:
        """The tokenizer's chat template for a record with `tools`, which takes `day` (ISO 8601) for today.

        Raises TokenizerError where none of several templates is the one.
        """
        try:
            source = tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise TokenizerError(
                f"no chat template is the tokenizer's default: {' '.join(str(error).split())}"
            ) from error
        if day is None or not asks_for_the_day(source):
            return cls(tokenizer, source, tools, {})
        formats = {found[2] for found in _TIME_FORMAT.finditer(source)}
        times = {found: datetime.fromisoformat(day).strftime(found) for found in formats}
        return cls(tokenizer, _FIXED_CLOCK + source, tools, times)

    @property
    def is_marked(self) -> bool:
        """Whether the template says what the assistant generates."""
        return _GENERATION_MARKER.search(self.source) is not None

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """The text of `messages`; `prompt`: with what asks for an answer. Raises whatever the template raises."""
        return self._render(messages, add_generation_prompt=prompt)[0]

    def render_marked(self, messages: Messages) -> tuple[str, list[Span]]:
        """The text, and the stretches of it that the template marks.

        Not transformers' own mask of tokens: it goes wrong where a tokenizer's offsets leave out the space before a
        word.
        """
        return self._render(messages, return_assistant_tokens_mask=True)

    def attempt(self, messages: Messages, prompt: bool = False) -> str | None:
        """As `render`; None where the template refuses these messages."""
        try:
            return self.render(messages, prompt)
        except UserError:
            raise
        except Exception:  # a template is a program of the model's author
            return None

    def _render(self, messages: Messages, **options: bool) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with bounded_rendering():
                texts, marks = render_jinja_template(
                    conversations=[messages],
                    tools=self.tools,
                    chat_template=self.source,
                    times=self.times,
                    **self.tokenizer.special_tokens_map,
                    **options,
                )
        except TimeoutError as error:  # another form of the record would take as long
            raise TokenizerError(f"the chat template fails: {error}. Set data.chat_template to another one") from error
        return texts[0], marks[0] if marks else []


def asks_for_the_day(source: str | dict[str, str]) -> bool:
    """Whether a chat template, or one of several, writes a date."""
    return any(_CLOCK in each for each in ([source] if isinstance(source, str) else source.values()))


def fit_messages(template: ChatTemplate, messages: Messages) -> tuple[Messages, str | None]:
    """Return the messages in a form that the template takes, and what had to be changed for it.

    The first form is that of `tokenizer.apply_chat_template`. Raises LeftOut with the template's own words.
    """
    error: Exception | None = None
    for changes, form in _forms(messages):
        try:
            text = template.render(form)
        except UserError:
            raise
        except Exception as raised:  # a template is a program of the model's author
            error = error or raised
            continue
        if not _is_python(form, text):
            return form, f"{CHANGED} with {' and '.join(changes)}" if changes else None
    if error is not None:
        raise LeftOut("a record that the chat template fails on, left out", str(error))
    raise LeftOut("a record of which the chat template writes lists or objects as Python does, left out")


Change = tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]


def _forms(messages: Messages) -> Iterator[tuple[list[str], Messages]]:
    """(what is changed, the messages): first as they are without nulls, then with ever more changes."""
    without_nulls = [{key: part for key, part in message.items() if part is not None} for message in messages]
    yield [], without_nulls
    choices: list[list[Change | None]] = [
        [None, ("a `content` of null", _null_content), ("an empty `content`", _empty_content)],
        [None, ("arguments of calls as objects", _object_arguments), ("arguments as JSON text", _text_arguments)],
        [None, ("a `content` as one text", _one_text), ("texts as parts of a `content`", _in_parts)],
    ]
    for chosen in sorted(product(*choices), key=lambda choice: -choice.count(None)):
        form, names = without_nulls, []
        for name, change in filter(None, chosen):
            changed = [change(message) for message in form]
            names += [name] if changed != form else []
            form = changed
        if names and len(names) == len(chosen) - chosen.count(None):
            yield names, form


def _null_content(message: dict[str, Any]) -> dict[str, Any]:
    return {"content": None, **message}


def _empty_content(message: dict[str, Any]) -> dict[str, Any]:
    return {"content": "", **message}


def _one_text(message: dict[str, Any]) -> dict[str, Any]:
    content, texts = message.get("content"), text_parts(message)
    if not isinstance(content, (list, dict)):
        return message
    joined = isinstance(content, list) and len(texts) == len(content)
    return {**message, "content": "".join(texts) if joined else json.dumps(content, ensure_ascii=False)}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _object_arguments(message: dict[str, Any]) -> dict[str, Any]:
    def as_object(arguments: Any) -> Any:
        try:
            value = decode_json(arguments)
        except (AttributeError, ValueError):  # the first: no text
            return arguments
        return value if isinstance(value, dict) else arguments

    return _with_arguments(message, as_object)


def _text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    return _with_arguments(
        message, lambda given: json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else given
    )


def _with_arguments(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    def changed(call: Any) -> Any:
        if "function" in call:
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [changed(call) for call in calls]} if isinstance(calls, list) else message


def _is_python(messages: Messages, text: str) -> bool:
    """Whether the template has written a list of parts, or the arguments of a call, as Python shows them."""
    calls = [call.get("function", call) for message in messages for call in message.get("tool_calls") or []]
    values = [message.get("content") for message in messages] + [call.get("arguments") for call in calls]
    shown = [(str(value), value) for value in values if isinstance(value, (list, dict))]
    return any(form in text and form != json.dumps(value, ensure_ascii=False) for form, value in shown)
