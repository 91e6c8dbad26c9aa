"""What attention costs, by the windows of a model's layers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from aliquot.models.structure import attention_widths

SIZES = {"num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 8, "hidden_size": 32}


@pytest.mark.parametrize(
    "model_type, settings, expected",
    [
        ("llama", {}, {None: 6 * 32}),
        ("mistral", {"sliding_window": 16}, {16: 6 * 32}),
        ("mistral", {"sliding_window": None}, {None: 6 * 32}),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 16}, {None: 6 * 32}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, {None: 64, 16: 128}),
        ("gemma3_text", {"sliding_window": 16}, {16: 5 * 32, None: 32}),
        ("jamba", {"attn_layer_period": 3, "attn_layer_offset": 1}, {None: 2 * 8 * 4}),
        ("mamba", {}, {}),
    ],
)
def test_attention_by_window(model_type: str, settings: dict[str, Any], expected: dict[int | None, int]) -> None:
    assert attention_widths(AutoConfig.for_model(model_type, **SIZES, **settings)) == expected
