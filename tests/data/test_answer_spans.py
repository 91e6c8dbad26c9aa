"""Where answers stand in what templates of many kinds write, and whose words are not there."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors

from aliquot.data.chat import EMPTY_ANSWER, NO_ANSWER, NOTHING_LEARNED, TEMPLATE_LEAVES_OUT, encode_chat
from aliquot.errors import UserError
from tests.data.test_chat import CHATML, MARKED, TALK, learned, said, tokenizer

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


def test_an_answer_that_begins_the_chat_is_learned_without_what_is_before_it() -> None:
    talk = [GREETING, *TALK]
    for template, end in ((CHATML, "</s>\n"), (MARKED, "</s>"), (CLOSED, "</s>\n"), (THINKING, "</s>\n")):
        assert said(DEFAULT + template, talk)[0] == f"dog{end}"
    # Without a prompt for an answer the answer alone can be told.
    assert said(DEFAULT + CHATML.partition("{% if add")[0], talk)[0] == "dog</s>\n"


def test_templates_that_end_a_text_or_render_the_last_answer_otherwise() -> None:
    assert said(CLOSED, TALK) == ["dog é 12345</s>\n", "stop</s>\n</s>"]
    assert said(CLOSED, TALK[:3]) == ["dog é 12345</s>\n"]
    assert said(THINKING, TALK) == ["dog é 12345</s>\n", "<think></think>stop</s>\n"]
    assert said(RETURNING, TALK) == ["dog é 12345</s>", "stop<s>"]
    hidden = THINKING.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' }}")
    with pytest.raises(UserError, match=r"renders earlier turns differently .* data\.chat_template"):
        said(hidden.replace("</s>\n", "{{ loop.length }}"), TALK)


def test_a_prompt_may_open_a_thought_that_an_answer_has_not() -> None:
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
        assert encode_chat(trimmed, talk) == encode_chat(whole, talk)
        assert "trim_offsets=True" in repr(trimmed.backend_tokenizer.post_processor), "as it was before"
    made = tokenizer(MARKED.replace("</s>", ""))
    _, ids, mask = encode_chat(made, talk)
    assert made.decode([token for token, bit in zip(ids, mask, strict=True) if bit]) == " dog   \U0001f916\u00e9"


def test_calls_that_the_template_does_not_know_are_no_answers() -> None:
    asked, told = TALK[0], {"role": "tool", "content": '{"t": "now"}'}
    record: dict[str, Any] = {"messages": [asked, call(), told, GREETING], "context": 0}
    for template, end in ((CHATML, "</s>\n"), (MARKED, "</s>")):
        assert learned(record, template)[1:] == ([f"dog{end}"], TEMPLATE_LEAVES_OUT)
    older = {"role": "assistant", "content": "", "function_call": {"name": "weather", "arguments": "{}"}}
    assert learned({**record, "messages": [asked, older]}, CHATML)[2] == NOTHING_LEARNED
    spoken = [asked, {**call(), "content": "dog"}]
    assert learned({**record, "messages": spoken}, CHATML)[1:] == (["dog</s>\n"], TEMPLATE_LEAVES_OUT)
    # One that knows them, and writes what a tool says as JSON, leaves nothing out.
    assert learned(record, CALLING)[1:] == (['weather {"city": "fox"}</s>\n', "dog</s>\n"], None)
    thoughtful = [asked, {**GREETING, "reasoning_content": "It's now"}]
    assert learned({**record, "messages": thoughtful}, CHATML)[2] == TEMPLATE_LEAVES_OUT


def test_a_template_that_takes_arguments_as_json_alone_gets_them_so() -> None:
    adding = CALLING.replace("{{ c.function.arguments | tojson }}", "{{ ' with ' + c.function.arguments }}")
    record: dict[str, Any] = {"messages": [TALK[0], call()], "context": 0}
    assert learned(record, adding)[1:] == (['weather  with {"city": "fox"}</s>\n'], None)


def test_an_empty_answer_teaches_nothing_and_is_counted() -> None:
    talk = [TALK[0], {"role": "assistant", "content": " "}, *TALK[2:]]
    for template, end in ((CHATML, "</s>\n"), (MARKED, "</s>")):
        assert learned({"messages": talk, "context": 0}, template)[1:] == ([f"stop{end}"], EMPTY_ANSWER)
        assert learned({"messages": talk[:2], "context": 0}, template) == ("", [], NO_ANSWER)


def test_an_eos_that_is_added_is_learned_where_the_last_message_is() -> None:
    lined = MARKED.replace("\n{% endfor %}", "{{ '\\n' }}{% endfor %}")
    for template in (lined, CHATML):
        assert learned({"messages": TALK, "context": 0}, template, suffix=(1,))[1][-1].endswith("</s>")
        whole, parts, _ = learned({"messages": TALK[:3], "context": 0}, template, suffix=(1,))
        assert whole.endswith("\n</s>"), "added, but the user's"
        assert len(parts) == 1
    assert learned({"messages": TALK, "context": 0}, lined, suffix=(1,))[1][1:] == ["stop</s>", "</s>"]
