"""A chat template that loops for ever ends in one line, wherever it is rendered."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aliquot.config.data_section import DataSection
from aliquot.core.errors import UserError
from aliquot.data.chat_template import ChatTemplate, fit_messages
from aliquot.data.prepare import prepare
from aliquot.models import bounded_rendering
from aliquot.models.generate import chat_ids
from tests.data.stores import byte_level

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
RECURSES = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
NO_RANGE = "{% for a in s %}".replace("s", "'" + 99 * "x" + "'") * 8 + "{% endfor %}" * 8
MARKED = "{% generation %}x{% endgeneration %}"
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("template", [LOOPS, RECURSES, NO_RANGE, MARKED + LOOPS])
@pytest.mark.parametrize(
    "render",
    [
        lambda tokenizer, talk: fit_messages(ChatTemplate.of(tokenizer), talk),
        lambda tokenizer, talk: ChatTemplate.of(tokenizer).render_marked(talk),
        lambda tokenizer, talk: chat_ids(tokenizer, talk[:1], None),
    ],
    ids=["data", "marked data", "chat"],
)
def test_a_template_that_loops_for_ever(
    monkeypatch: pytest.MonkeyPatch, template: str, render: Callable[..., Any]
) -> None:
    monkeypatch.setattr(bounded_rendering, "CPU_SECONDS", 0.05)
    tokenizer = byte_level()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"the chat template fails.* loops for ever") as error:
        render(tokenizer, TALK)
    assert "\n" not in error.value.line
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.long
@pytest.mark.parametrize("num_proc", [1, 2])
def test_in_a_run(tmp_path: Path, num_proc: int) -> None:
    """In this process and in one that tokenises."""
    records = [json.dumps({"messages": TALK})] * (2 if num_proc == 1 else 40_000)
    (tmp_path / "chats.jsonl").write_text("\n".join(records))
    tokenizer = byte_level()
    tokenizer.chat_template = LOOPS
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    section = DataSection(
        path=[str(tmp_path / "chats.jsonl")], tokenizer=str(tmp_path / "tokenizer"), sequence_length=32,
        num_proc=num_proc, cache_directory=tmp_path / "cache",
    )  # fmt: skip
    with pytest.raises(UserError, match="loops for ever"):
        prepare(section, None, 1000)
