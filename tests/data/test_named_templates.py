"""Chat templates that `data.chat_template` names: they write what published templates write, and mark the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from aliquot.config.data_section import CHAT_TEMPLATES, DataSection
from aliquot.core.errors import TokenizerError
from aliquot.data.formats import format_of
from aliquot.data.text_encoder import EncoderSpec
from aliquot.data.tokenizer import give_template
from tests.data.stores import byte_level, encode_record
from tests.tools.chat_shapes import SHAPES, SYSTEM, TEMPLATES, TOOLS, calls, said, stretches, tool, user

TALK = ["one answer", "two answers", "system", "last is a question", "blanks around"]
CALLS = ["call", "call, answer", "call of null", "call with words", "call, answer, question", "called again"]
THOUGHTS = ["thought", "thoughts", "thought in the text"]
ENDS = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>", "qwen": "<|im_end|>"}


def named(name: str, without: str = "") -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokens = [token for token in CHAT_TEMPLATES[name] if token != without]
    tokenizer.add_tokens(tokens, special_tokens=True)
    give_template(tokenizer, DataSection(path="x", chat_template=name))
    return tokenizer


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


@pytest.mark.parametrize(
    ("name", "published", "shapes"),
    [
        ("chatml", "qwen3_instruct_2507", TALK),
        ("qwen", "qwen3_instruct_2507", [*TALK, *CALLS, "system in the middle", "questions in a row"]),
        ("qwen", "qwen3", THOUGHTS),
        ("llama3", "llama3", [*TALK, "system in the middle", "greeting", "answers in a row"]),
        ("gemma", "gemma3", TALK),
    ],
)
def test_text_is_that_of_a_published_template(name: str, published: str, shapes: list[str]) -> None:
    ours, theirs = named(name), byte_level()
    theirs.chat_template = TEMPLATES[published]
    for shape in shapes:
        for prompt in (False, True):
            options: dict[str, Any] = {"add_generation_prompt": prompt, "tools": TOOLS if shape in CALLS else None}
            expected = rendered(theirs, SHAPES[shape], **options)
            if shape == "thoughts" or shape == "thought in the text":  # theirs begins an empty thought
                expected = expected.replace("<think>\n\n</think>\n\n", "")
            assert rendered(ours, SHAPES[shape], **options) == expected, shape


@pytest.mark.parametrize("shape", ["call", "call, answer", "call, answer, question"])
def test_calls_of_llama3_are_those_of_llama_3_1(shape: str) -> None:
    theirs = byte_level()
    theirs.chat_template = TEMPLATES["llama3_1"]
    expected = rendered(theirs, SHAPES[shape], tools=TOOLS)
    preamble = expected[expected.index("<|start_header_id|>system") : expected.index("<|start_header_id|>user")]
    assert rendered(named("llama3"), SHAPES[shape], tools=TOOLS) == expected.replace(preamble, "")


def test_text_of_mistral_and_zephyr() -> None:
    """The strings of mistral are those of the package mistral-common for version 3 of Mistral's tokenizer."""
    talk = SHAPES["two answers"]
    assert rendered(named("mistral"), talk) == (
        "<s>[INST] quick?[/INST] brown fox</s>[INST] dog?[/INST] jumps</s>"
    )  # fmt: skip
    listed = f"[AVAILABLE_TOOLS] {json.dumps(TOOLS)}[/AVAILABLE_TOOLS]"
    assert rendered(named("mistral"), [SYSTEM, user(), calls(), tool()], tools=TOOLS) == (
        f"<s>{listed}[INST] be kind\n\nquick?[/INST]"
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "lazy"}, "id": "call12345"}]</s>'
        '[TOOL_RESULTS] {"content": "it is wet", "call_id": "call12345"}[/TOOL_RESULTS]'
    )
    assert rendered(named("zephyr"), [SYSTEM, *talk[:2], user()], add_generation_prompt=True) == (
        "<|system|>\nbe kind</s>\n<|user|>\nquick?</s>\n<|assistant|>\nbrown fox</s>\n"
        "<|user|>\nquick?</s>\n<|assistant|>\n"
    )


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_answers_and_their_ends_are_learned(name: str) -> None:
    tokenizer, end = named(name), ENDS.get(name, "</s>")
    assert learned(tokenizer, {"messages": SHAPES["two answers"]})[0] == [f"brown fox{end}", f"jumps{end}"]
    parts, notes = learned(tokenizer, {"messages": SHAPES["call, answer"], "tools": TOOLS})
    if name in ("gemma", "zephyr"):
        assert (parts, list(notes.values())) == ([], [f"{name} has no tool calls"])
    else:
        assert len(parts) == 2 and "weather" in parts[0] and parts[0].endswith(end) and not notes
    two = [user(), said("", tool_calls=calls()["tool_calls"] * 2), tool(), tool("it is dry"), said()]
    assert bool(learned(tokenizer, {"messages": two, "tools": TOOLS})[0]) == (name in ("chatml", "mistral", "qwen"))


def learned(tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    text = format_of(DataSection(path="x"), record, "x:1").read(record, "x:1").text
    ids, mask, notes = encode_record(tokenizer, text, EncoderSpec("unused", True, (), (), answers=True, templated=True))
    return [part.strip() for part in stretches(tokenizer, ids, mask)], notes


def test_missing_special_tokens_are_refused() -> None:
    with pytest.raises(TokenizerError, match=r"llama3 writes <\|eot_id\|>, which .* pieces.*=\[\"<\|eot_id\|>\"\]"):
        named("llama3", without="<|eot_id|>")
    endless = byte_level(eos=None)
    give_template(endless, DataSection(path="x", chat_template="{{ messages }}"))
    with pytest.raises(TokenizerError, match=r"zephyr ends answers with eos, which the tokenizer does not have"):
        give_template(endless, DataSection(path="x", chat_template="zephyr"))
