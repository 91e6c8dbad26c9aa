"""Read the fields of a record into a document: a text, a chat, or a prompt with one answer or two.

A document with an answer is a dict in one of three forms, which chat.py encodes:

- `{"messages": [...], "context": n}`, where the first n messages are not learned,
- `{"prompt": ..., "completion": ...}`,
- `{"instruction": ..., "input": ..., "output": ...}`.

A pair of answers becomes `{"chosen": ..., "rejected": ...}`, each in one of these forms. A rated answer has one of
these forms with `"label"`, which is true or false.

The dict also has `"system"`, `"tools"` and `"chat_template_kwargs"` if the record has them. Messages stay unchanged,
because the chat template decides how to render them. A chat with a tool call that cannot be read gets
`"left_out": reason`, so that the chat is counted and not learned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aliquot.data.chat_messages import (
    UNREADABLE_CALL,
    has_readable_calls,
    read_as,
    read_message,
    read_messages,
    read_text,
    read_text_or_messages,
    text_parts,
)
from aliquot.data.documents import UNCLEAR_PROMPT, BadRecordError, Kind

INSTRUCTION = "instruction"  # the prompt of Alpaca's and Dolly's formats, with an input and perhaps a history
INPUTS = ("input", "context")  # field names of the input in Alpaca's and in Dolly's format
CHATS: tuple[Kind, ...] = ("messages", "conversations")  # field names of a chat
Messages = list[dict[str, Any]]
# The longest beginning that ends with white space, or with punctuation of languages without spaces between words.
_WHOLE_WORDS = re.compile(r".*[\s\u3000-\u303f\uff01-\uff0f\uff1a-\uff20]", re.DOTALL)


def read_chat(value: object, record: Mapping[str, Any], field: str, where: str) -> list[dict[str, Any]]:
    """Return the document of a chat; [] if it has no message."""
    messages = read_messages(value or [], field, where)
    return [_conversation(messages, 0, record, where)] if messages else []


def read_answers(
    prompt: str | None, answers: Sequence[str], record: Mapping[str, Any], others: Sequence[str], where: str
) -> list[dict[str, Any]]:
    """Return the document of each answer to a prompt; [] if they are blank.

    Args:
        prompt: the field of the prompt. None: each of two answers is a whole chat, or begins with the prompt.
        answers: the fields of one answer, or of two answers to the same prompt.
        others: further fields with text, one of which may be the prompt of two answers.
        where: the place of the record.
    """
    said = [read_text_or_messages(record[field], field, where) for field in answers]
    is_pair, more, history = len(answers) > 1, "", Messages()
    question: str | Messages = ""
    if prompt == INSTRUCTION:
        with_input = next((field for field in INPUTS if record.get(field)), INPUTS[0])
        question, more = (read_text(record.get(field), field, where) for field in (INSTRUCTION, with_input))
        history = _history(record, where)
    elif prompt is not None:
        question = read_text_or_messages(record[prompt], prompt, where)
    elif is_pair and others and any(said) and not any(map(_is_whole, said)):
        raise BadRecordError(
            f"a pair without a prompt, but with text in {', '.join(map(repr, others))}: give data.chosen,"
            " data.rejected and data.prompt, the field of the prompt, or list fields that are no prompt in"
            " data.unused_fields",
            where,
            UNCLEAR_PROMPT,
        )
    texts = [part for part in said if isinstance(part, str)]
    if history or isinstance(question, list) or len(texts) < len(said):
        asked = "\n\n".join(filter(None, (question, more))) if isinstance(question, str) else question
        chats = [_as_messages(part, "assistant") for part in said]
        chats, context = _with_questions(history + _as_messages(asked, "user"), chats, isinstance(asked, str))
        context = context if is_pair or not history else 0
        return [_conversation(chat, context, record, where) for chat in chats] if any(chats) else []
    if prompt is None and is_pair:
        question, texts = split_prompt(*texts)
    names = (INSTRUCTION, "input", "output") if prompt == INSTRUCTION else ("prompt", "completion")
    before = (question, more) if prompt == INSTRUCTION else (question,)
    documents: list[dict[str, Any]] = [dict(zip(names, (*before, text), strict=True)) for text in texts]
    if not any(part.strip() for document in documents for part in document.values()):
        return []
    system = read_text(record.get("system"), "system", where)
    extras = ({"system": system} if system else {}) | _template_values(record, where)
    return [document | extras for document in documents]


def _with_questions(questions: Messages, chats: list[Messages], is_text: bool) -> tuple[list[Messages], int]:
    """Return the whole chats of one or two answers, and the number of messages before the answers.

    `is_text`: the prompt of the record is a text, which may repeat the question of a whole chat.
    """
    begin = questions[:1] if not is_text else []
    is_whole = [len(chats) > 1 and (chat[:1] == begin if begin else _is_whole(chat)) for chat in chats]
    if all(is_whole):
        return chats, _common(*chats)
    if any(is_whole):  # the one answer replaces the last message of the other chat, as in ms-swift
        questions = chats[is_whole.index(True)][:-1]
        chats = [chat[len(questions) :] if whole else chat for chat, whole in zip(chats, is_whole, strict=True)]
    return [questions + chat for chat in chats], len(questions)


def _is_whole(said: str | Messages) -> bool:
    """Return whether an answer is a chat that begins with a question."""
    return isinstance(said, list) and bool(said) and said[0]["role"] != "assistant"


def split_prompt(chosen: str, rejected: str) -> tuple[str, list[str]]:
    """Return the common beginning of two answers, in whole words, and the rest of each."""
    length = _common(chosen, rejected)
    if not all(rest == "" or rest[0].isspace() for rest in (chosen[length:], rejected[length:])):
        words = _WHOLE_WORDS.match(chosen[:length])
        length = words.end() if words is not None else 0
    length -= chosen[:length].endswith(" ")  # the space before an answer belongs to the answer
    return chosen[:length], [chosen[length:], rejected[length:]]


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts or chats."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _history(record: Mapping[str, Any], where: str) -> Messages:
    messages = []
    for turn in read_as(list, record.get("history"), "history", where):
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadRecordError("field 'history' must be a list of pairs: a question, and its answer", where)
        said = zip(("user", "assistant"), turn, strict=True)
        messages += [{"role": role, "content": read_text(text, "history", where)} for role, text in said]
    return messages


def _as_messages(said: str | Messages, role: str) -> Messages:
    return said if isinstance(said, list) else [{"role": role, "content": said}] if said else []


def _conversation(messages: Messages, context: int, record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the document of a chat, with the record's `system` in front."""
    if record.get("system"):
        system = read_message({"role": "system", "content": record["system"]}, "system", where)
        if not messages or text_parts(messages[0]) != text_parts(system):
            messages, context = [system, *messages], context + (context > 0)
    unreadable = {} if all(map(has_readable_calls, messages)) else {"left_out": UNREADABLE_CALL}
    return {"messages": messages, "context": context, **_template_values(record, where), **unreadable}


def _template_values(record: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return the record's `tools` and `chat_template_kwargs` for the chat template, as TRL does.

    Tables often hold both as JSON text.
    """
    tools = read_as(list, record.get("tools"), "tools", where)
    values = read_as(dict, record.get("chat_template_kwargs"), "chat_template_kwargs", where)
    return {name: value for name, value in (("tools", tools), ("chat_template_kwargs", values)) if value}
