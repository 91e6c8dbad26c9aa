"""What a model is made of: attention by the windows of its layers, and what must stay exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.models.meta import attention_widths
from aliquot.models.structure import fp32_weights, freeze_buffers

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


def test_router_biases_stay_fp32() -> None:
    with torch.device("meta"):
        llama, deepseek = (
            AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_hidden_layers=4))
            for kind in ("llama", "deepseek_v3")
        )
    freeze_buffers(deepseek)
    assert fp32_weights(llama) == frozenset()
    assert fp32_weights(deepseek) == {"model.layers.3.mlp.gate.e_score_correction_bias"}
