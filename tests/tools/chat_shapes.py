"""Chat templates of the package `trl` times shapes of chats: `python -m tests.tools.chat_shapes` prints the outcomes.

`=`: the text is what `apply_chat_template` writes, and where TRL marks answers the mask is its marks. Arguments of
calls are objects, as transformers documents them, unless the template accepts JSON text alone. `c`: the template fails
on the record as it is, or writes Python's lists, and takes a changed one; `e`: as `=`, without what TRL marks of an
answer of which the template writes no word; `-`: the record is left out. The reasons stand below.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import date
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from aliquot.config.data_section import DataSection
from aliquot.data.chat import ANSWERS_NOT_WRITTEN, NO_ANSWER, UNKNOWN_PLACE
from aliquot.data.chat_template import CHANGED
from aliquot.data.formats import format_of
from aliquot.data.text_encoder import EncoderSpec
from tests.data.stores import byte_level, encode_record

Message = dict[str, Any]
TEMPLATES = {
    file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8")
    for file in sorted(files("trl").joinpath("chat_templates").iterdir(), key=lambda file: file.name)
    if file.name.endswith(".jinja")
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city"}},
                "required": ["city"],
            },
        },
    }
]


def user(content: Any = "quick?") -> Message:
    return {"role": "user", "content": content}


def said(content: Any = "brown fox", **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def calls(content: Any = "", city: str = "lazy", as_text: bool = False, **more: Any) -> Message:
    arguments: Any = {"city": city}
    function = {"name": "weather", "arguments": json.dumps(arguments) if as_text else arguments}
    return said(content, tool_calls=[{"id": "call12345", "type": "function", "function": function}], **more)


def tool(content: str = "it is wet") -> Message:
    return {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


SYSTEM: Message = {"role": "system", "content": "be kind"}
SHAPES: dict[str, list[Message]] = {
    "one answer": [user(), said()],
    "two answers": [user(), said(), user("dog?"), said("jumps")],
    "system": [SYSTEM, user(), said()],
    "system in the middle": [user(), said(), SYSTEM, user("dog?"), said("jumps")],
    "greeting": [said("hello"), user(), said()],
    "answers in a row": [user(), said(), said("jumps")],
    "questions in a row": [user(), user("dog?"), said()],
    "last is a question": [user(), said(), user("dog?")],
    "parts": [user(parts("quick?", "dog?")), said(parts("brown fox"))],
    "parts of the user": [user(parts("quick?")), said()],
    "null": [user(), said(None), user("dog?"), said("jumps")],
    "blanks around": [user(" quick? "), said("\n brown fox \n"), user("dog?"), said(" jumps\n")],
    "thought": [user(), said(reasoning_content="lazy")],
    "thoughts": [user(), said(reasoning_content="lazy"), user("dog?"), said("jumps", reasoning_content="over")],
    "thought in the text": [user(), said("<think>\nlazy\n</think>\n\nbrown fox"), user("dog?"), said("jumps")],
    "Chinese thought": [user(), said("<think>慢慢想。</think>棕狐")],
    "Japanese thoughts": [user(), said("<think>考える</think>狐だ"), user("dog?"), said("<think></think>跳ぶ")],
    "Thai thought": [user(), said("<think>คิดดูก่อน</think>หมา"), user("dog?"), said("แมว", reasoning_content="คิด")],
    "Korean thought after a call": [user(), calls(), tool(), said("<think>생각</think>여우")],
    "call": [user(), calls()],
    "call, answer": [user(), calls(), tool(), said()],
    "call of null": [user(), calls(None), tool(), said()],
    "arguments as text": [user(), calls(as_text=True), tool(), said()],
    "call with a thought": [user(), calls(reasoning_content="over"), tool(), said()],
    "call with words": [user(), calls("jumps"), tool(), said()],
    "call, answer, question": [user(), calls(), tool(), said(), user("dog?"), said("stop")],
    "called again": [user(), calls(), tool(), calls(city="now"), tool("it is dry"), said()],
}
WITH_TOOLS = {name for name, chat in SHAPES.items() if any("tool_calls" in message for message in chat)}
_WORDS = ("fox", "jumps", "hello", "stop", "lazy", "now", "狐", "跳ぶ", "หมา", "แมว", "여우")  # of answers


class Outcome(NamedTuple):
    kind: str  # "=", "c", "e", "-", or "?" for what must not be
    why: str


def outcome(tokenizer: PreTrainedTokenizerFast, shape: str) -> Outcome:
    """What becomes of a chat of `shape` with the tokenizer's chat template, beside what transformers makes of it."""
    record: dict[str, Any] = {"messages": SHAPES[shape]}
    record |= {"tools": TOOLS} if shape in WITH_TOOLS else {}
    text = format_of(DataSection(path="x"), record, "x:1").read(record, "x:1").text
    spec = EncoderSpec("unused", fast=True, prefix=(), suffix=(), answers=True, templated=True, day=str(date.today()))
    ids, mask, notes = encode_record(tokenizer, text, spec)
    marked = "generation" in tokenizer.chat_template and "endgeneration" in tokenizer.chat_template
    expected, refusal = None, ""
    for form in ["call, answer", shape] if shape == "arguments as text" else [shape]:
        try:
            rendered = tokenizer.apply_chat_template(
                SHAPES[form], tools=record.get("tools"), return_dict=True, return_assistant_tokens_mask=marked
            )
        except Exception as error:  # a template is a program of the model's author
            refusal = str(error)
            continue
        expected = expected or rendered
    as_python = expected is not None and "[{'type': 'text'" in tokenizer.decode(expected["input_ids"])
    if not ids:
        reason, detail = next(iter(notes.items()))
        is_right = expected is None or as_python or reason in (ANSWERS_NOT_WRITTEN, NO_ANSWER, UNKNOWN_PLACE)
        return Outcome("-" if is_right else "?", f"{reason}: {detail}".rstrip(": "))
    changed = next((reason for reason in notes if reason.startswith(CHANGED)), "")
    if changed:
        return Outcome("c" if expected is None or as_python else "?", changed.removeprefix(CHANGED))
    if expected is None or ids != expected["input_ids"]:
        return Outcome("?", f"another text than that of transformers {refusal}")
    if marked and mask != (marks := whole_characters(tokenizer, ids, expected["assistant_masks"])):
        learned, all_marked = stretches(tokenizer, ids, mask), stretches(tokenizer, ids, marks)
        silent = set(all_marked) - set(learned)
        says = any(word in stretch for stretch in silent for word in _WORDS)
        if not set(learned) < set(all_marked) or says:
            return Outcome("?", f"another mask: {learned} of {all_marked}")
        return Outcome("e", "without the mark of an answer of which the template writes no word")
    return Outcome("=", "")


def whole_characters(tokenizer: PreTrainedTokenizerFast, ids: list[int], marks: list[int]) -> list[int]:
    """Return the marks of transformers, which of a mark's last character has the first token alone, with its others."""
    whole: list[int] = []
    for number, bit in zip(ids, marks, strict=True):
        whole.append(bit or int(any(whole[-1:]) and tokenizer.decode([number]) == "\ufffd"))
    return whole


def stretches(tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[int]) -> list[str]:
    """The text of each stretch of tokens that is learned."""
    edges = [n for n, (one, other) in enumerate(pairwise([0, *mask, 0])) if one != other]
    return [tokenizer.decode(ids[start:stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def made(name: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def table() -> Iterator[tuple[str, dict[str, Outcome]]]:
    for name in TEMPLATES:
        tokenizer = made(name)
        yield name, {shape: outcome(tokenizer, shape) for shape in SHAPES}


def main() -> None:
    for number, shape in enumerate(SHAPES):
        print(f"{chr(ord('a') + number)}  {shape}")
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for name, outcomes in table():
        print(f"{name:36} {''.join(found.kind for found in outcomes.values())}")
        kinds.update(found.kind for found in outcomes.values())
        reasons.update(f"{found.kind} {found.why}" for found in outcomes.values() if found.why)
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    for reason, count in reasons.most_common():
        print(f"{count:4} {reason}")


if __name__ == "__main__":
    main()
