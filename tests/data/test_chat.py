"""Conversations: the loss is on what the assistant says, and on nothing else."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from aliquot.data.chat import encode_chat
from aliquot.errors import UserError
from tests.data.stores import byte_level

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
TALK = [
    {"role": "user", "content": "fox?"},
    {"role": "assistant", "content": "dog é 12345"},
    {"role": "user", "content": "It's now"},
    {"role": "assistant", "content": "stop"},
]


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = byte_level()
    made.chat_template = template
    return made


def said(template: str, messages: list[dict[str, str]]) -> list[str]:
    """The stretches under the mask, as text."""
    made = tokenizer(template)
    text, ids, mask = encode_chat(made, messages)
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
    assert said(MARKED, TALK) == ["dog é 12345</s>", "stop</s>"]
    assert said(CHATML, TALK) == ["dog é 12345</s>\n", "stop</s>\n"]
    assert said(STRICT, TALK) == ["dog é 12345</s>\n", "stop</s>\n"]
    assert said(CHATML, TALK[:1]) == []
    assert said(CHATML, TALK[1:]) == ["<|assistant|>dog é 12345</s>\n", "stop</s>\n"]


def test_templates_that_do_not_grow_or_fail_are_named() -> None:
    with pytest.raises(UserError, match=r"conversation that begins 'fox\?': the chat template renders earlier turns"):
        said(FORGETFUL, TALK)
    with pytest.raises(UserError, match=r"begins 'dog .*': the chat template fails \(the user begins\)"):
        said(STRICT, TALK[1:])
