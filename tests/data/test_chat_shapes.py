"""Chat templates of models as TRL ships them, over shapes of chats: what transformers writes is what is encoded, and
what TRL marks is what is learned; everything else is left out."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.tools.chat_shapes import SHAPES, TEMPLATES, made, outcome

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
