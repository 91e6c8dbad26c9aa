"""Weight decay is for matrices, whatever the number of dimensions of a norm or a bias."""

from __future__ import annotations

import pytest

from aliquot.optim.adamw import decays


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), True),
        ("model.layers.0.input_layernorm.weight", (8,), False),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 16), False),  # gpt-oss: one an expert
        ("model.layers.0.self_attn.q_norm.weight", (4, 8), False),  # cohere: one a head
        ("model.norm.weight", (2, 8), False),
        ("model.layers.0.layernorm.mlp.fc1.weight", (8, 8), True),  # within a module that is called a norm
        ("model.layers.0.normalized_proj.weight", (8, 8), True),
        ("bias", (2, 8), False),
    ],
)
def test_matrices_decay(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert decays(name, shape) is expected
