"""Lay out a record with answers: render its text, and find the span of each answer in the text.

Only the template process calls this file for records that a chat template renders. Some templates mark these spans with
{% generation %}. For other templates, this file finds a span by rendering the chat again: cut off after a message, or
with a message reworded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aliquot.config.data_section import fitting_templates
from aliquot.core.errors import TokenizerError
from aliquot.data.chat_messages import has_detail, is_learned, unread_flags
from aliquot.data.chat_template import ChatTemplate, LeftOut, Messages, Span, TokenizerFacts, fit_messages
from aliquot.data.rendered_messages import has_words, in_other_words, is_silent, learned_parts, leaves_out

if TYPE_CHECKING:
    from aliquot.data.text_encoder import EncoderSpec

ENCODING = 10  # part of the cache key; increase it whenever a record gets other tokens or another mask

# A record is encoded as a whole, because answers are located in the whole text. A tokenizer needs about 170 bytes of
# memory per character, or 400 if every character is a token: 0.7 or 1.6 GiB for the longest record.
LONGEST_BYTES = 4 << 20
TOO_LONG = f"a record with answers of more than {LONGEST_BYTES >> 20} MiB, left out"
NO_ANSWER = "a record without an answer, left out"
ANSWERS_NOT_WRITTEN = "a record whose answers the chat template does not write, left out"
TEMPLATE_LEAVES_OUT = "a record with words that the chat template leaves out"
UNREAD_FLAG = "a record with true or false in a message, for which neither aliquot nor the chat template has a use"
NO_SPACE = "a record without a space between prompt and answer, whose words become one"
NOT_RENDERED = "a record with tools or chat_template_kwargs, which only a chat template can render: there is none"
EMPTY_ANSWER = "a record with an empty answer, which is not learned"

AS_TEXT = "a record whose texts hold special tokens, encoded as text"
AS_TOKENS = "a record with special tokens in its texts, encoded as special tokens"
UNKNOWN_PLACE = (
    "a record with answers of unknown place, because the chat template renders earlier turns differently once later"
    " turns follow, left out: set data.chat_template to a template that marks answers with {% generation %}"
)

_QUESTION: dict[str, Any] = {"role": "user", "content": "x"}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "x"}

# The prompt of Stanford Alpaca, for instruction records if there is no chat template.
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


Notes = dict[str, str]  # remarks on a record: reason -> details; all records share the wording of a reason


@dataclass(frozen=True)
class RecordLayout:
    """The text of a record with an answer, and the spans of the text that are encoded or learned in their own way."""

    text: str
    learned: list[Span] | None  # None: all of it
    as_text: list[Span]  # their special tokens are encoded as ordinary text
    notes: Notes
    learns_end: bool  # whether the suffix of EncoderSpec is learned


def lay_out(texts: list[str], tokenizer: TokenizerFacts, spec: EncoderSpec) -> list[list[RecordLayout] | LeftOut]:
    """Return the layout of each record, or of both answers of a pair; for a record that is left out, the reason."""
    layouts: list[list[RecordLayout] | LeftOut] = []
    for text in texts:
        record = json.loads(text)
        try:
            parts = list(record.values()) if spec.pairs else [record]
            layouts.append([_lay_out(part, text, tokenizer, spec) for part in parts])
        except LeftOut as error:
            layouts.append(error)
    return layouts


def _lay_out(record: dict[str, Any], text: str, tokenizer: TokenizerFacts, spec: EncoderSpec) -> RecordLayout:
    """Return the layout of a record, or of an answer of a pair. `text` is the JSON of the whole record."""
    if len(text.encode()) > LONGEST_BYTES:
        raise LeftOut(TOO_LONG)
    if "left_out" in record:
        raise LeftOut(record["left_out"])
    everything, notes = spec.train_on == "all", Notes()
    special = tokenizer.special_pattern.search(text)
    as_text = spec.special_tokens_as_text and special is not None and tokenizer.is_fast
    special_notes = {} if special is None else {AS_TEXT if as_text else AS_TOKENS: repr(special[0])}
    if not spec.templated:
        prompt, completion = _prompt_and_completion(record, tokenizer.special)
        if not completion.strip() and (spec.pairs or not everything):
            raise LeftOut(NO_ANSWER)
        notes |= {NOT_RENDERED: ""} if {"tools", "chat_template_kwargs"} & record.keys() else {}
        notes |= {NO_SPACE: ""} if prompt[-1:].isalnum() and completion[:1].isalnum() else {}
        whole = prompt + completion
        stretches = [(0, len(whole))] if as_text else []
        return RecordLayout(whole, [(len(prompt), len(whole))], stretches, notes | special_notes, learns_end=True)
    messages, context = _messages(record)
    learned = _learned_messages(messages, context, spec)
    if not learned and (spec.pairs or not everything):
        raise LeftOut(NO_ANSWER)
    template = ChatTemplate.of(tokenizer, record, spec.day)
    form, whole, spans, changed = locate_answers(template, messages, None if everything else learned)
    empty = any(message["role"] == "assistant" and not has_words(message) for message in messages[context:])
    notes |= {changed: ""} if changed else {}
    notes |= {EMPTY_ANSWER: ""} if empty and not everything else {}
    notes |= {TEMPLATE_LEAVES_OUT: ""} if leaves_out(messages, template.tools or [], whole) else {}
    unread = sorted({flag for message in messages for flag in unread_flags(message, template.source)})
    notes |= {UNREAD_FLAG: ", ".join(unread)} if unread else {}
    stretches = template.stretches_as_text(whole, form) if as_text else []
    return RecordLayout(whole, spans, stretches, notes | special_notes, learns_end=len(messages) - 1 in learned)


def locate_answers(
    template: ChatTemplate, messages: Messages, turns: Sequence[int] | None
) -> tuple[Messages, str, list[Span] | None, str | None]:
    """Return (form, text, spans, changes) of `messages`, rendered by the chat template.

    The spans are those of the messages with the indices `turns`; None if `turns` is None. The {% generation %} marks of
    the template delimit the turns of the assistant; without marks, a turn extends from its generation prompt to the
    next message, and includes the special token that begins this message if no other ends the turn. Turns whose words
    the template omits have no span. `form` are the messages as changed to fit the
    template, and `changes` describes how, or is None.
    """
    form, changed = fit_messages(template, messages)
    detailed = any(has_detail(messages[index]) for index in turns or ())
    if turns is None:
        return form, template.render(form), None, changed
    if template.is_marked:
        assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        whole, marks = template.render_marked(form, return_assistant_tokens_mask=True)
        spans = _marks_of_turns(marks, len(assistants))
        if spans is not None:
            marked = dict(zip(assistants, spans, strict=True))
            spans = [marked.get(index) or _rendered_span(template, form, whole, index) for index in turns]
        elif set(turns) == {index for index in assistants if has_words(messages[index])} and not detailed:
            return form, whole, marks, changed
        else:
            raise LeftOut(
                "a record with answers, or parts of answers, that are excluded from learning, whose chat template does"
                " not mark each turn of the assistant, left out"
            )
    else:
        whole = template.render(form)
        spans = [_rendered_span(template, form, whole, index) for index in turns]
    learned: list[Span] = []
    for index, (start, stop) in zip(turns, spans, strict=True):
        turn = whole[start:stop]
        if is_silent(messages[index], turn, partial(template.tokenizer.special_pattern.sub, "")):
            continue
        parts = learned_parts(messages[index], turn)
        if parts is None:
            raise LeftOut("a record with train_detail for a content that the chat template changes, left out")
        learned += [(start + low, start + high) for low, high in parts]
        if not template.is_marked and learned[-1][1] == stop:
            marker = _next_marker(template, form, whole, stop)
            learned[-1] = (learned[-1][0], stop + len(marker))
            whole += marker if stop == len(whole) else ""
    return form, whole, learned, changed


def _next_marker(template: ChatTemplate, messages: Messages, whole: str, stop: int) -> str:
    """Return the special token at the beginning of the next message if no special token ends the answer before it.

    Models of such templates (GLM) stop at this token. After the last message it is the token that begins a question.
    """
    if whole[:stop].rstrip().endswith(template.tokenizer.special):
        return ""
    text = whole if stop < len(whole) else template.attempt([*messages, _QUESTION]) or ""
    match = template.tokenizer.special_pattern.match(text, stop) if text.startswith(whole) else None
    return "" if match is None else match[0]


def _messages(record: dict[str, Any]) -> tuple[Messages, int]:
    """Return the messages of a record, and the number of messages at their beginning that are never learned."""
    if "messages" in record:
        return record["messages"], record["context"]
    if "prompt" in record:
        question, answer = record["prompt"], record["completion"]
    else:
        question, answer = "\n\n".join(filter(None, (record["instruction"], record["input"]))), record["output"]
    system = [{"role": "system", "content": record["system"]}] if "system" in record else []
    answers = [{"role": "assistant", "content": answer}] if answer.strip() else []
    return [*system, {"role": "user", "content": question}, *answers], 0


def _prompt_and_completion(record: dict[str, Any], special: Sequence[str]) -> tuple[str, str]:
    if "messages" in record:
        raise TokenizerError(
            "the records are chats, but the tokenizer has no chat template, as for most base models, or"
            f" data.chat_template is none. Set data.chat_template to {fitting_templates(special)}, whose special tokens"
            " this tokenizer has"
        )
    system = f"{record['system']}\n\n" if "system" in record else ""
    if "prompt" in record:
        return system + record["prompt"], record["completion"]
    text = record["input"]
    paired = ", paired with an input that provides further context" if text else ""
    prompt = _ALPACA.format(
        paired=paired, instruction=record["instruction"], input=f"### Input:\n{text}\n\n" if text else ""
    )
    return system + prompt, record["output"]


def _learned_messages(messages: Messages, context: int, spec: EncoderSpec) -> list[int]:
    """Return the indices of the messages to learn: after the first `context`, with words, not excluded by a flag."""
    if spec.train_on == "last_turn":  # a turn is a question with all messages up to the next question
        answers = (index for index, message in enumerate(messages) if message["role"] == "assistant")
        questions = (index for index in range(max(answers, default=0)) if messages[index]["role"] == "user")
        context = max(context, max(questions, default=0))
    return [
        index
        for index, message in enumerate(messages)
        if index >= context and is_learned(message, spec.roles) and has_words(message)
    ]


def _marks_of_turns(marks: list[Span], turns: int) -> list[Span] | None:
    """Return one marked span for each assistant turn; None if there are more or fewer marks than `turns`."""
    if len(marks) == turns:
        return marks
    joined: list[Span] = []  # adjacent marks as one: a template may mark the end of the text apart from the answer
    for start, stop in marks:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined if len(joined) == turns else None


def _rendered_span(template: ChatTemplate, messages: Messages, whole: str, index: int) -> Span:
    """Return the span of message `index`: from the end of its header to the next message."""
    start = _start(template, messages, whole, index)
    if start is not None:
        end = next((end for end in _ends(template, messages, whole, index + 1) if end > start), None)
        if end is not None:
            return start, end
    if _render_reworded(template, messages, index) == whole:  # the template renders no word of this message
        return 0, 0
    raise LeftOut(UNKNOWN_PLACE)


def _start(template: ChatTemplate, messages: Messages, whole: str, index: int) -> int | None:
    """Return the index in `whole` at which a message begins: an answer after its generation prompt, else at a word.

    A generation prompt may open a reasoning block that the answer lacks (DeepSeek-R1, Qwen3 models that always reason).
    The answer then begins after the longest prefix of the prompt that `whole` contains.
    """
    is_answer = messages[index]["role"] == "assistant"
    asked = template.attempt(messages[:index], prompt=True) if index and is_answer else None
    if asked is not None and whole.startswith(asked):
        return len(asked)
    words = _words(template, messages, whole, index)
    if words is None or not is_answer:
        return None if words is None else words[0]
    before = (_words(template, messages, whole, earlier) for earlier in range(index - 1, -1, -1))
    low = next((span[1] for span in before if span is not None), 0)
    header, prompt = whole[low : words[0]], _prompt(template)
    shared = next((count for count in range(len(prompt), len(prompt) // 2, -1) if prompt[:count] in header), 0)
    return low + header.rindex(prompt[:shared]) + shared if shared else words[0]


def _words(template: ChatTemplate, messages: Messages, whole: str, index: int) -> Span | None:
    """Return the span of `whole` that changes if message `index` is reworded; None if nothing changes."""
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
    """Yield candidate indices in `whole` at which the first `count` messages end."""
    if count == len(messages):
        yield len(whole)
        return
    yield from (len(text) for text in _beginnings(template, messages[:count]) if whole.startswith(text))
    # Some templates omit the reasoning before a tool call once a final answer follows (gpt-oss). The header of the next
    # message still shows where the call ends.
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
    """Yield candidate texts for `messages` as they would appear at the beginning of a longer chat.

    No single rendering fits all templates. Some end a chat with a special token unless they add a generation prompt
    (Phi-3). Others render the last answer of a chat differently from an answer that a question follows (Qwen3).
    """
    rendered, asked = template.attempt(messages), template.attempt(messages, prompt=True)
    yield from filter(None, [rendered])
    prompt = _prompt(template)
    if asked is not None and prompt and asked.endswith(prompt):
        yield asked.removesuffix(prompt)
    questioned = template.attempt([*messages, _QUESTION])
    # Measure how the template renders a question: after another question or, because some templates require alternating
    # roles, after an answer to that other question.
    for inserted in ([_QUESTION], [_QUESTION, _ANSWER]):
        before, after = (template.attempt([*messages, *inserted, *further]) for further in ([], [_QUESTION]))
        if questioned is None or before is None or after is None or not after.startswith(before):
            continue
        question = after.removeprefix(before)
        if question and questioned.endswith(question):
            yield questioned.removesuffix(question)


def _prompt(template: ChatTemplate) -> str:
    """Return the generation prompt of the template; empty if there is none, or if it cannot be separated."""
    bare, asked = template.attempt([_QUESTION]), template.attempt([_QUESTION], prompt=True)
    if bare is None or asked is None:
        return ""
    if not asked.startswith(bare):
        bare = bare.removesuffix(template.tokenizer.variables.get("eos_token", ""))
    return asked[len(bare) :] if asked.startswith(bare) else ""
