"""Where answers stand in what templates of many kinds write, and whose words are not there."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from aliquot.data.chat import ANSWERS_NOT_WRITTEN, EMPTY_ANSWER, NO_ANSWER, TEMPLATE_LEAVES_OUT, encode_chat
from aliquot.data.chat_template import CHANGED, ChatTemplate, LeftOut
from aliquot.data.text_encoder import TextEncoder
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


def encoded(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> tuple[Any, ...]:
    return encode_chat(ChatTemplate.of(tokenizer), messages, 0, False, TextEncoder(tokenizer, "", False))


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
    with pytest.raises(LeftOut, match=r"renders earlier turns differently .* data\.chat_template"):
        said(THINKING.replace("</s>\n", "{{ loop.length }}"), TALK)


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
        assert encoded(trimmed, talk) == encoded(whole, talk)
        assert "trim_offsets=True" in repr(trimmed.backend_tokenizer.post_processor), "as it was before"
    made = tokenizer(MARKED.replace("</s>", ""))
    _, ids, mask, _ = encoded(made, talk)
    assert made.decode([token for token, bit in zip(ids, mask, strict=True) if bit]) == " dog   \U0001f916\u00e9"


def test_calls_that_the_template_does_not_know_are_no_answers() -> None:
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


def test_a_template_that_takes_arguments_as_json_alone_gets_them_so() -> None:
    adding = CALLING.replace("{{ c.function.arguments | tojson }}", "{{ ' with ' + c.function.arguments }}")
    record: dict[str, Any] = {"messages": [TALK[0], call()], "context": 0}
    told = ['weather  with {"city": "fox"}</s>\n'], f"{CHANGED} with arguments as JSON text"
    assert learned(record, adding)[1:] == told


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


def test_a_record_is_changed_only_where_the_template_does_not_take_it() -> None:
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


def test_an_answer_of_which_the_template_writes_no_word_is_not_learned() -> None:
    parts = [{"type": "text", "text": "dog"}]
    for template in (CHATML, MARKED):
        template = template.replace("{{ m.content }}", "{{ m.content if m.content is string }}")
        record: dict[str, Any] = {"messages": [TALK[0], {"role": "assistant", "content": parts}], "context": 0}
        assert learned(record, template)[1:] == ([], ANSWERS_NOT_WRITTEN)
        record["messages"] += TALK[2:]
        assert [said.removesuffix("\n") for said in learned(record, template)[1]] == ["stop</s>"]
