"""Conversations: the loss is on what the assistant says, and on nothing else."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date
from itertools import groupby
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from aliquot.config.data_section import fitting_templates
from aliquot.core.errors import UserError
from aliquot.data.chat import (
    ANSWERS_NOT_WRITTEN,
    AS_TEXT,
    AS_TOKENS,
    EMPTY_ANSWER,
    LONGEST_BYTES,
    NO_ANSWER,
    NO_SPACE,
    NOT_RENDERED,
    TEMPLATE_LEAVES_OUT,
    TOO_LONG,
    UNREAD_FLAG,
    locate_answers,
)
from aliquot.data.chat_template import CHANGED, ChatTemplate, LeftOut, TokenizerFacts
from aliquot.data.rendered_messages import has_words
from aliquot.data.text_encoder import NO_END, EncoderSpec, TextEncoder
from tests.data.stores import byte_level, encode_record
from tests.tools.chat_shapes import SHAPES, TEMPLATES, made, outcome

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}"
    "<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + CHATML
TALK: list[dict[str, str]] = [
    {"role": "user", "content": "fox?"},
    {"role": "assistant", "content": "dog é 12345"},
    {"role": "user", "content": "It's now"},
    {"role": "assistant", "content": "stop"},
]


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = byte_level()
    made.chat_template = template
    return made


def _answers(messages: list[dict[str, Any]]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant" and has_words(message)]


def said(template: str, messages: list[dict[str, str]]) -> list[str]:
    """The stretches under the mask, as text."""
    made = tokenizer(template)
    text, ids, mask, _ = encoded(made, messages)
    assert len(ids) == len(mask)
    assert text == made.decode(ids) == made.apply_chat_template(messages, tokenize=False)
    stretches: list[list[int]] = [[]]
    for token, bit in zip(ids, mask, strict=True):
        if bit:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return [made.decode(stretch) for stretch in stretches if stretch]


def test_only_the_assistants_words_and_their_end_are_learned() -> None:
    for template, messages, answers in (
        (MARKED, TALK, ["dog é 12345</s>", "stop</s>"]),
        (CHATML, TALK, ["dog é 12345</s>\n", "stop</s>\n"]),
        (STRICT, TALK, ["dog é 12345</s>\n", "stop</s>\n"]),
        (CHATML, TALK[:1], []),
        (CHATML, TALK[1:], ["dog é 12345</s>\n", "stop</s>\n"]),
    ):
        assert said(template, messages) == answers


def test_the_next_role_s_marker_ends_an_answer_without_an_end() -> None:
    """As GLM's models stop; the template of `trl` for training adds the same tokens."""
    plain, training = made("glm4moe"), made("glm4moe_training")
    for tokenizer_of_glm in (plain, training):
        tokenizer_of_glm.add_tokens(["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"], special_tokens=True)
    for shape in ("one answer", "two answers", "call, answer", "system in the middle"):
        text, ids, mask, _ = encoded(plain, SHAPES[shape])
        assert (text, ids, mask) == encoded(training, SHAPES[shape])[:3]
        assert text.endswith(("fox<|user|>", "jumps<|user|>"))
    spelt_out = {"messages": [{"role": "user", "content": "what is <|user|>?"}, TALK[1]], "context": 0}
    spec = EncoderSpec("unused", True, (), (), answers=True, templated=True, special_tokens_as_text=True)
    ids, mask, notes = encode_record(plain, json.dumps(spelt_out), spec)
    assert ids and mask[-1] and ids.count(ids[-1]) == 2, notes


@pytest.mark.parametrize("template", [CHATML, MARKED, CHATML.replace("m.content", "m.content.strip()")])
def test_loss_on_parts_of_an_answer(template: str) -> None:
    """As in axolotl, an end_offset is the index of the last character, and the end of the answer is learned, too."""
    content, end = "  brown fox jumps over\n", "</s>" if template == MARKED else "</s>\n"
    detail = [
        {"begin_offset": content.index(word), "end_offset": content.index(word) + len(word) - 1, "train": train}
        for word, train in (("over", True), ("jumps", False), ("own", True), ("brown", True))
    ]
    answer = {"role": "assistant", "content": content, "train_detail": detail}
    parts = learned({"messages": [TALK[0], answer, *TALK[2:]], "context": 0}, template)[1]
    is_stripped = ".strip()" in template
    # The tokenizer has a token for " brown", which is learned as a whole.
    brown, over = ("brown", "over") if is_stripped else (" brown", "over\n")
    assert parts == [brown, f"{over}{end}", f"stop{end}"]
    assert learned({"messages": [TALK[0], {**answer, "train_detail": []}], "context": 0}, template)[2] == NO_ANSWER
    changed = template.replace(".strip()", "").replace("m.content", "m.content|replace('fox', 'cat')")
    assert "train_detail for a content" in str(learned({"messages": [TALK[0], answer], "context": 0}, changed)[2])


def test_shrinking_or_failing_templates_are_named() -> None:
    with pytest.raises(LeftOut, match=r"the chat template renders earlier turns .* data\.chat_template"):
        said(CHATML.replace("</s>", "{{ loop.length }}"), TALK)
    assert said(FORGETFUL, TALK) == ["<|assistant|>stop"], "of the earlier answer nothing is written"
    with pytest.raises(LeftOut, match=r"the chat template fails on, left out', 'the user begins'"):
        said(STRICT, TALK[1:])


def learned(
    record: dict[str, object], template: str | None = None, **settings: object
) -> tuple[str, list[str], str | None]:
    """(the whole text, the stretches that are learned, why something is missing)."""
    made = byte_level()
    made.chat_template = template
    given = {"prefix": (), "suffix": (), **settings}
    spec = EncoderSpec("unused", True, answers=True, templated=template is not None, **given)
    ids, mask, notes = encode_record(made, json.dumps(record), spec)
    assert len(ids) == len(mask)
    reason = next((reason for reason in notes if reason != NO_END), None)
    stretches = [list(pairs) for bit, pairs in groupby(zip(mask, ids, strict=True), lambda pair: pair[0]) if bit]
    return made.decode(ids), [made.decode([token for _, token in pairs]) for pairs in stretches], reason


ASKED = {"prompt": "The quick", "completion": " brown fox"}
INSTRUCTION = {"instruction": "It's now?", "input": "12345", "output": "stop"}


def test_completion_without_template_follows_its_prompt() -> None:
    assert learned(ASKED, prefix=(0,), suffix=(1,)) == ("<s>The quick brown fox</s>", [" brown fox</s>"], None)
    # A token over the border is learned: without it the answer would have no beginning.
    assert learned({"prompt": "The quick ", "completion": "brown"}) == ("The quick brown", [" brown"], None)
    whole, said, _ = learned(INSTRUCTION, suffix=(1,))
    assert said == ["stop</s>"]
    assert whole.startswith("Below is an instruction that describes a task, paired with an input")
    assert "### Instruction:\nIt's now?\n\n### Input:\n12345\n\n### Response:\nstop" in whole
    assert "Input" not in learned({**INSTRUCTION, "input": ""})[0]


def test_with_a_template_everything_becomes_a_chat() -> None:
    assert learned(ASKED, CHATML) == (
        "<|user|>The quick</s>\n<|assistant|> brown fox</s>\n", [" brown fox</s>\n"], None
    )  # fmt: skip
    assert learned({**INSTRUCTION, "system": "hi"}, MARKED) == (
        "<|system|>hi</s><|user|>It's now?\n\n12345</s><|assistant|>stop</s>", ["stop</s>"], None
    )  # fmt: skip


def test_turns_of_the_prompt_and_of_no_weight_are_not_learned() -> None:
    for template, end in ((CHATML, "</s>\n"), (MARKED, "</s>")):
        assert learned({"messages": TALK, "context": 2}, template)[1] == [f"stop{end}"]
        unweighted = [{**TALK[1], "weight": 0} if message is TALK[1] else message for message in TALK]
        assert learned({"messages": unweighted, "context": 0}, template)[1] == [f"stop{end}"]


def test_loss_on_last_turn_and_on_roles() -> None:
    for template, end in ((CHATML, "</s>\n"), (MARKED, "</s>")):
        for messages, expected in ((TALK[:2], ["dog é 12345"]), (TALK, ["stop"]), ([*TALK, TALK[0]], ["stop"])):
            parts = learned({"messages": messages, "context": 0}, template, train_on="last_turn")[1]
            assert parts == [f"{part}{end}" for part in expected]
        calls = [*TALK, TALK[0], call(), {"role": "tool", "content": "12345"}, GREETING]
        assert len(learned({"messages": calls, "context": 0}, CALLING, train_on="last_turn")[1]) == 2, (
            "a call and the answer after it"
        )
        both = learned({"messages": TALK, "context": 0}, template, roles=("user", "assistant"))[1]
        assert [part.removesuffix("\n") for part in both] == [f"{message['content']}</s>" for message in TALK]
        questions = learned({"messages": TALK, "context": 0}, template, roles=("user",))[1]
        assert [part.removesuffix("\n") for part in questions] == ["fox?</s>", "It's now</s>"]
        kept = [TALK[0], TALK[1], TALK[2], {**TALK[3], "weight": 0}]
        assert learned({"messages": kept, "context": 0}, template, train_on="last_turn") == ("", [], NO_ANSWER)


TOOLS = [{"type": "function", "function": {"name": "weather"}}]
WITH_TOOLS = "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}" + CHATML


def test_template_gets_tools() -> None:
    record: dict[str, object] = {"messages": TALK, "context": 0, "tools": TOOLS}
    plain, said, _ = learned({"messages": TALK, "context": 0}, WITH_TOOLS)
    assert learned(record, WITH_TOOLS) == (f"<tool>weather{plain}", said, None)
    assert learned(record, CHATML)[2] == TEMPLATE_LEAVES_OUT


def ids_of(record: dict[str, object], template: str | None, **settings: Any) -> tuple[list[int], list[int], Any]:
    made = tokenizer(template or "")
    spec = EncoderSpec("unused", True, (), (), answers=True, templated=template is not None, **settings)
    return encode_record(made, json.dumps(record), spec)


def test_template_gets_variables_of_the_record() -> None:
    template = "{{ enable_thinking | default('unset') }}" + CHATML
    record = {"messages": TALK[:2], "chat_template_kwargs": {"enable_thinking": False}}
    assert learned(record | {"context": 0}, template)[0].startswith("False<|user|>")
    for name in ("messages", "chat_template"):
        ids, _, reason = learned(record | {"context": 0, "chat_template_kwargs": {name: "x"}}, template)
        assert not ids and reason == "a record whose chat_template_kwargs set a variable that aliquot sets, left out"


def test_unread_flags_of_messages_are_counted() -> None:
    chat = {"messages": [TALK[0], TALK[1] | {"learn": False}], "context": 0}
    assert learned(chat, CHATML)[2] == UNREAD_FLAG
    assert learned(chat, CHATML + "{{ messages[1].learned }}")[2] == UNREAD_FLAG
    assert learned(chat, CHATML + "{{ messages[1].learn }}")[2] is None


def test_tools_without_a_template_are_counted() -> None:
    record = {"prompt": "fox?", "completion": "dog"}
    assert NOT_RENDERED not in ids_of(record, None)[2]
    for unused in ({"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert NOT_RENDERED in ids_of({**record, **unused}, None)[2]
    assert NO_SPACE in ids_of({**record, "prompt": "the fox"}, None)[2] and NO_SPACE not in ids_of(record, None)[2]


def test_special_tokens_in_author_text_are_text() -> None:
    """Those of the template stay what they are; the text and what is learned of it are the same."""
    forged = [
        {"role": "user", "content": "fox?</s>\n<|assistant|>dog"},
        {"role": "assistant", "content": [{"type": "text", "text": "</s> now <s>"}]},
        *TALK[2:],
    ]
    record: dict[str, object] = {"messages": forged, "context": 0, "tools": [{"name": "</s>"}]}
    each = "{{ m.content if m.content is string else m.content[0].text }}"
    made = tokenizer("{{ tools[0].name }}" + CHATML.replace("{{ m.content }}", each))
    for template in (
        made.chat_template,
        made.chat_template.replace(each, f"{{% generation %}}{each}{{% endgeneration %}}"),
    ):
        tokens, as_tokens, told = ids_of(record, template)
        letters, as_letters, counted = ids_of(record, template, special_tokens_as_text=True)
        assert list(told.items()) == [(AS_TOKENS, "'</s>'")] or told[AS_TOKENS] == "'</s>'"
        assert counted[AS_TEXT] == "'</s>'"
        assert (tokens.count(1), letters.count(1), tokens.count(0), letters.count(0)) == (7, 4, 1, 0)
        assert made.decode(tokens) == made.decode(letters)
        learned_of = [
            made.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
            for ids, mask in ((tokens, as_tokens), (letters, as_letters))
        ]
        assert learned_of[0] == learned_of[1]
    plain = ids_of({"messages": TALK, "context": 0}, CHATML, special_tokens_as_text=True)
    assert plain == ids_of({"messages": TALK, "context": 0}, CHATML), "where there are none, nothing is else"
    bare = {"prompt": "fox?</s>", "completion": "dog"}
    assert 1 in ids_of(bare, None)[0]
    assert 1 not in ids_of(bare, None, special_tokens_as_text=True)[0]
    cut = CHATML.replace("{{ m.content }}", "{{ m.content[:5] }}")
    assert "changes the special tokens" in next(iter(ids_of(record, cut, special_tokens_as_text=True)[2]))


def test_added_non_special_tokens_stay_tokens() -> None:
    made = tokenizer(CHATML)
    made.add_tokens(["<think>"])
    record = {"messages": [TALK[0], {"role": "assistant", "content": "<think></s>"}], "context": 0}
    spec = EncoderSpec("unused", True, (), (), answers=True, templated=True, special_tokens_as_text=True)
    ids = encode_record(made, json.dumps(record), spec)[0]
    assert made.convert_tokens_to_ids("<think>") in ids
    assert ids.count(1) == 2, "the template's own"


def test_template_uses_the_given_date() -> None:
    dated = "{% set f = '%d %b %Y' %}{{ strftime_now(f) }} {{ strftime_now(\"%j\") }}\n" + CHATML
    record = {"messages": TALK[:2], "context": 0}
    assert learned(record, dated, day="2024-02-03")[0].startswith("03 Feb 2024 034\n<|user|>")
    today = learned(record, dated, day=str(date.today()))[0]
    assert today == tokenizer(dated).apply_chat_template(TALK[:2], tokenize=False)


def test_unterminated_answers_are_counted() -> None:
    ended, headed = (
        {"messages": TALK, "context": 0},
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
    )
    assert NO_END in ids_of(ended, headed)[2]
    assert NO_END not in ids_of(ended, CHATML)[2]
    assert NO_END in ids_of({"prompt": "fox?", "completion": "dog"}, None)[2]
    assert NO_END not in ids_of(ended, headed, train_on="all")[2]


def test_whole_record_is_learned_on_request() -> None:
    whole, said, _ = learned({"messages": TALK[:1], "context": 0}, FORGETFUL, train_on="all")
    assert said == [whole] == ["<|user|>fox?"]
    assert learned(ASKED, train_on="all")[1] == ["The quick brown fox"]


def test_records_without_labels_have_a_reason() -> None:
    assert learned({"messages": TALK[:1], "context": 0}, CHATML) == ("", [], NO_ANSWER)
    assert learned({"messages": TALK, "context": 4}, CHATML) == ("", [], NO_ANSWER)
    assert learned({"prompt": "fox?", "completion": " "}) == learned({"prompt": "fox?", "completion": ""}, CHATML)
    assert learned({"prompt": "fox?", "completion": ""}) == ("", [], NO_ANSWER)
    assert learned({"prompt": "", "completion": "s"}) == ("", [], "a record in which nothing is learned, left out"), (
        "nothing comes before it"
    )
    endless = {"prompt": "fox?", "completion": "é" * (LONGEST_BYTES // 2)}
    assert learned(endless) == ("", [], TOO_LONG), "before memory is taken for it"
    tools = [*TALK[:1], {"role": "tool", "content": "12345"}, *TALK[1:2]]
    deaf = CHATML.replace("<|{{ m.role }}|>{{ m.content }}", "<|{{ m.role }}|>{{ m.content if m.role != 'tool' }}")
    assert learned({"messages": tools, "context": 0}, deaf)[1:] == (
        ["dog \u00e9 12345</s>\n"], TEMPLATE_LEAVES_OUT
    ), "that another says it later is no matter"  # fmt: skip
    tools[1]["content"] = "It's now"
    assert learned({"messages": tools, "context": 0}, deaf)[2] == TEMPLATE_LEAVES_OUT


def test_a_chat_without_a_template_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"the tokenizer has no chat template, .*\. Set data\.chat_template to zephyr, whose"
    ):
        learned({"messages": TALK, "context": 0})
    assert fitting_templates(["<|im_start|>", "<|im_end|>", "<|eot_id|>"]) == "chatml or qwen or zephyr"


GREETING = {"role": "assistant", "content": "dog"}
DEFAULT = "{% if messages[0].role != 'system' %}<|system|>the fox</s>\n{% endif %}"
CLOSED = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")  # as Phi-3's
# As Qwen3's: thoughts, if only empty ones, are there from the last question on.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As gpt-oss's: the last answer ends in another token.
RETURNING = CHATML.replace(
    "{{ m.content }}</s>\n",
    "{{ m.content }}{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<s>"
    "{% else %}</s>{% endif %}",
)
CALLING = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content if m.role != 'tool' else m.content | tojson }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}",
)


def call(arguments: object = None) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments or {"city": "fox"}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def encoded(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> tuple[Any, ...]:
    """(the whole text, its tokens, their mask, how the messages were changed)."""
    template = ChatTemplate.of(TokenizerFacts.of(tokenizer), {})
    _, text, spans, changed = locate_answers(template, messages, _answers(messages))
    ids, mask = TextEncoder(tokenizer, EncoderSpec("unused", True, (), ())).encode(text, spans, [])
    return text, ids, mask, changed


def test_leading_answer_is_learned_without_its_prefix() -> None:
    talk = [GREETING, *TALK]
    for template, end in ((CHATML, "</s>\n"), (MARKED, "</s>"), (CLOSED, "</s>\n"), (THINKING, "</s>\n")):
        assert said(DEFAULT + template, talk)[0] == f"dog{end}"
    # Without a prompt for an answer the answer alone can be told.
    assert said(DEFAULT + CHATML.partition("{% if add")[0], talk)[0] == "dog</s>\n"


def test_templates_with_special_last_answers() -> None:
    assert said(CLOSED, TALK) == ["dog é 12345</s>\n", "stop</s>\n</s>"]
    assert said(CLOSED, TALK[:3]) == ["dog é 12345</s>\n"]
    assert said(THINKING, TALK) == ["dog é 12345</s>\n", "<think></think>stop</s>\n"]
    assert said(RETURNING, TALK) == ["dog é 12345</s>", "stop<s>"]
    with pytest.raises(LeftOut, match=r"renders earlier turns differently .* data\.chat_template"):
        said(THINKING.replace("</s>\n", "{{ loop.length }}"), TALK)


def test_prompt_may_open_a_thought() -> None:
    """Its header is not learned, and where an earlier answer begins is known."""
    opened = "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
    bare, _, _ = CHATML.partition("{% if add")
    assert said(bare.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>\n") + opened, TALK) == [
        "dog é 12345</s>\n",
        "stop</s>\n",
    ]
    always = THINKING.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>\n").replace(
        "<think></think>", "<think>\n\n</think>\n"
    )
    always = always.replace("<|assistant|>{% endif %}", "<|assistant|>\n<think>\n{% endif %}")
    assert said(always, TALK) == ["dog é 12345</s>\n", "\n</think>\nstop</s>\n"]
    # Of the answer's own beginning nothing is taken for the prompt's.
    told = [*TALK[:2], {"role": "assistant", "content": "<tag>"}]
    assert said(bare.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>\n") + opened, told)[-1] == "<tag></s>\n"


def test_offsets_without_their_spaces_change_no_mask() -> None:
    talk = [
        {"role": "user", "content": "fox \U0001f916"},
        {"role": "assistant", "content": " dog  "},
        {"role": "user", "content": "It's now"},
        {"role": "assistant", "content": " \U0001f916\u00e9"},
    ]
    for template in (MARKED, MARKED.replace("</s>", ""), CHATML):
        whole, trimmed = tokenizer(template), tokenizer(template)
        trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        assert encoded(trimmed, talk) == encoded(whole, talk)
        assert "trim_offsets=True" in repr(trimmed.backend_tokenizer.post_processor), "as it was before"
    made = tokenizer(MARKED.replace("</s>", ""))
    _, ids, mask, _ = encoded(made, talk)
    assert made.decode([token for token, bit in zip(ids, mask, strict=True) if bit]) == " dog   \U0001f916\u00e9"


def test_calls_unknown_to_the_template_are_no_answers() -> None:
    asked, told = TALK[0], {"role": "tool", "content": '{"t": "now"}'}
    record: dict[str, Any] = {"messages": [asked, call(), told, GREETING], "context": 0}
    for template, end in ((CHATML, "</s>\n"), (MARKED, "</s>")):
        assert learned(record, template)[1:] == ([f"dog{end}"], TEMPLATE_LEAVES_OUT)
    older = {"role": "assistant", "content": "", "function_call": {"name": "weather", "arguments": "{}"}}
    assert learned({**record, "messages": [asked, older]}, CHATML)[2] == ANSWERS_NOT_WRITTEN
    spoken = [asked, {**call(), "content": "dog"}]
    assert learned({**record, "messages": spoken}, CHATML)[1:] == (["dog</s>\n"], TEMPLATE_LEAVES_OUT)
    # One that knows them, and writes what a tool says as JSON, leaves nothing out.
    assert learned(record, CALLING)[1:] == (['weather {"city": "fox"}</s>\n', "dog</s>\n"], None)
    thoughtful = [asked, {**GREETING, "reasoning_content": "It's now"}]
    assert learned({**record, "messages": thoughtful}, CHATML)[2] == TEMPLATE_LEAVES_OUT


def test_template_gets_arguments_as_an_object_also_from_json_text() -> None:
    """Templates write arguments with `tojson`, which would quote the JSON text of OpenAI's format a second time."""
    for arguments in ({"city": "fox"}, '{"city":"fox"}'):
        record = {"messages": [TALK[0], call(arguments)], "context": 0}
        assert learned(record, CALLING)[1:] == (['weather {"city": "fox"}</s>\n'], None)
    record = {"messages": [TALK[0], call("the fox")], "context": 0}
    assert learned(record, CALLING)[1:] == (['weather "the fox"</s>\n'], None)
    only_text = CALLING.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}")
    record = {"messages": [TALK[0], call('{"city":"fox"}')], "context": 0}
    assert learned(record, only_text)[1:] == (['weather {"city":"fox"}</s>\n'], None), "the text of the record"


def test_template_gets_json_arguments_if_required() -> None:
    adding = CALLING.replace("{{ c.function.arguments | tojson }}", "{{ ' with ' + c.function.arguments }}")
    record: dict[str, Any] = {"messages": [TALK[0], call()], "context": 0}
    told = ['weather  with {"city": "fox"}</s>\n'], f"{CHANGED} with arguments as JSON text"
    assert learned(record, adding)[1:] == told


def test_an_empty_answer_teaches_nothing_and_is_counted() -> None:
    talk = [TALK[0], {"role": "assistant", "content": " "}, *TALK[2:]]
    for template, end in ((CHATML, "</s>\n"), (MARKED, "</s>")):
        assert learned({"messages": talk, "context": 0}, template)[1:] == ([f"stop{end}"], EMPTY_ANSWER)
        assert learned({"messages": talk[:2], "context": 0}, template) == ("", [], NO_ANSWER)


@pytest.mark.parametrize(
    "content", ["<think>慢慢想。</think>狐狸", "<think></think>หมา", "<think>a b</think>yes", "<b>"]
)
def test_thoughts_need_no_spaces(content: str) -> None:
    """A template that writes a thought between other newlines writes it, and one that leaves it out writes the rest."""
    cut = "{% set parts = m.content.split('</think>') %}"
    whole = "{{ parts[0].replace('<think>', '<think>\\n') }}{{ '\\n</think>\\n' if parts[1] }}{{ parts[1] }}"
    record = {"messages": [TALK[0], {"role": "assistant", "content": content}], "context": 0}
    for template, notes in ((whole, [None]), ("{{ parts[-1] }}", [TEMPLATE_LEAVES_OUT, None])):
        made = MARKED.replace("{{ m.content }}</s>{% endg", f"{cut}{template}</s>{{% endg")
        _, (stretch,), note = learned(record, made)
        assert stretch.endswith(f"{content.split('</think>')[-1]}</s>")
        assert note == notes[0 if "a b" in content or "慢" in content else -1]


def test_added_eos_is_learned_with_the_last_message() -> None:
    lined = MARKED.replace("\n{% endfor %}", "{{ '\\n' }}{% endfor %}")
    for template in (lined, CHATML):
        assert learned({"messages": TALK, "context": 0}, template, suffix=(1,))[1][-1].endswith("</s>")
        whole, parts, _ = learned({"messages": TALK[:3], "context": 0}, template, suffix=(1,))
        assert whole.endswith("\n</s>"), "added, but the user's"
        assert len(parts) == 1
    assert learned({"messages": TALK, "context": 0}, lined, suffix=(1,))[1][1:] == ["stop</s>", "</s>"]


# As gpt-oss's: a call without its thoughts once there is an answer, and never both words and thoughts.
THOUGHTLESS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('words or thoughts') }}{% endif %}"
    "{% if m.thinking and loop.index0 > ns.last %}<t>{{ m.thinking }}</t>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Qwen3.5's: it thinks behind the last question alone, there always.
THINKING_LAST = THINKING.replace(" and loop.last", "").replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
)


def test_turns_before_a_later_question_and_calls_with_thoughts() -> None:
    answered = [TALK[0], call(), {"role": "tool", "content": "12345"}, GREETING]
    record = {"messages": [*answered, *TALK[2:]], "context": 0}
    assert learned(record, THINKING_LAST)[1] == ["weather</s>\n", "dog</s>\n", "<think></think>stop</s>\n"]
    thoughtful = [TALK[0], {**call(), "thinking": "It's now"}, *answered[2:]]
    assert learned({"messages": thoughtful, "context": 0}, THOUGHTLESS)[1] == ["weather</s>\n", "dog</s>\n"]
    opened = CHATML.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>\n").replace(
        "<|assistant|>{% endif %}", "<|assistant|>\n<think>\n{% endif %}"
    )
    assert learned({"messages": [GREETING, *TALK[:2]], "context": 0}, opened)[1][0] == "dog</s>\n"


def test_records_are_changed_only_if_the_template_fails() -> None:
    """The first that it takes, in the order of what is changed."""
    parts = [{"type": "text", "text": "dog"}, {"type": "text", "text": "now"}]
    lined = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}\n{% endfor %}")
    asked = {"role": "user", "content": parts[:1]}
    record = {"messages": [asked, {"role": "assistant", "content": parts}], "context": 0}
    assert learned(record, lined)[1:] == (["dog\nnow\n</s>\n"], None)
    assert learned(record, CHATML)[1:] == (["dognow</s>\n"], f"{CHANGED} with a `content` as one text")
    texts = {"messages": [{"role": "user", "content": "fox"}, GREETING], "context": 0}
    told = f"{CHANGED} with texts as parts of a `content`"
    assert learned(texts, lined.replace("{{ p.text }}", "{{ p.text + '' }}"))[1:] == (["dog\n</s>\n"], told)
    answered = [TALK[0], call(), {"role": "tool", "content": {"is": ["now"]}}, GREETING]
    told = f"{CHANGED} with a `content` as one text"
    assert learned({"messages": answered, "context": 0}, CALLING.replace(" | tojson", "", 1))[2] == told
    assert learned({"messages": answered, "context": 0}, CALLING)[1:] == (
        ['weather {"city": "fox"}</s>\n', "dog</s>\n"],
        None,
    )
    # As DeepSeek-V3's.
    null = "{{ m.tool_calls[0].function.arguments + '' if m.content is none else m.content + '' }}"
    calling = {"messages": [TALK[0], {**call('{"city": "fox"}'), "content": None}], "context": 0}
    told = f"{CHANGED} with a `content` of null"
    assert learned(calling, CHATML.replace("{{ m.content }}", null))[1:] == (['{"city": "fox"}</s>\n'], told)
    each = "{{ c.function.name }} {{ c.function.arguments }}"
    written = "{{ m.content or '' }}{% for c in m.tool_calls or [] %}" + each + "{% endfor %}"
    assert learned(calling, CHATML.replace("{{ m.content }}", written))[1:] == (['weather {"city": "fox"}</s>\n'], None)
    calling["messages"][1] = call()
    told = f"{CHANGED} with arguments as JSON text"
    assert learned(calling, CHATML.replace("{{ m.content }}", written))[1:] == (['weather {"city": "fox"}</s>\n'], told)


def test_unrendered_answers_are_not_learned() -> None:
    parts = [{"type": "text", "text": "dog"}]
    for template in (CHATML, MARKED):
        template = template.replace("{{ m.content }}", "{{ m.content if m.content is string }}")
        record: dict[str, Any] = {"messages": [TALK[0], {"role": "assistant", "content": parts}], "context": 0}
        assert learned(record, template)[1:] == ([], ANSWERS_NOT_WRITTEN)
        record["messages"] += TALK[2:]
        assert [said.removesuffix("\n") for said in learned(record, template)[1]] == ["stop</s>"]


SHORT = ("qwen3", "llama3_training", "deepseekv3", "gptoss_training", "gemma3", "qwen3_5_think")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in TEMPLATES]
)
def test_a_template_over_all_shapes(name: str) -> None:
    tokenizer = made(name)
    outcomes = {shape: outcome(tokenizer, shape) for shape in SHAPES}
    assert not {shape: found.why for shape, found in outcomes.items() if found.kind == "?"}
    kinds = Counter(found.kind for found in outcomes.values())
    assert kinds["="] + kinds["c"] + kinds["e"] >= 6, outcomes
