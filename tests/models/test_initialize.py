"""Sharded initialisation draws what the model's own _init_weights would, in blocks that any rank can draw alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.models import initialize, meta
from tests.engines.cases import SMALL

SHAPES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {},
    "llama-scaled-rope": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                          "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "gemma": {"pad_token_id": 0},
    "modernbert": {"model_type": "modernbert-decoder", "tie_word_embeddings": False, "pad_token_id": 0},
    "rwkv": {},
}  # fmt: skip


def config_of(name: str) -> object:
    return AutoConfig.for_model(**{**SMALL, "model_type": name.split("-")[0], **SHAPES[name]})


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "rwkv"])  # which has none
def test_buffers_equal_a_cpu_instance(name: str) -> None:
    built = meta.build(config_of(name))
    stock = AutoModelForCausalLM.from_config(config_of(name))
    expected = dict(stock.named_buffers())
    found = dict(built.model.named_buffers())
    assert found.keys() == expected.keys() and found
    for key, buffer in expected.items():
        assert torch.equal(found[key], buffer), key
    assert all(parameter.is_meta for parameter in built.model.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_weights_have_the_distribution_of_the_model(name: str) -> None:
    built = meta.build(config_of(name))
    stock = AutoModelForCausalLM.from_config(config_of(name))
    for key, parameter in stock.state_dict().items():
        if key not in built.fills:
            continue
        numel = parameter.numel()
        fills = built.fills[key]
        of_layer = isinstance(fills, initialize.LayerFill)
        ours = fills.whole(1) if of_layer else initialize.draw(fills, 1, key, 0, 0, numel)
        assert ours.mean() == pytest.approx(float(parameter.mean()), abs=0.1)
        assert ours.std() == pytest.approx(float(parameter.std()), rel=0.2, abs=1e-6)
        # Constant parts (norms, biases, a padding row) are exactly the same ones. One drawn value may be 0 by chance.
        our_zeros, zeros = ours.view_as(parameter) == 0, parameter == 0
        assert torch.equal(our_zeros, zeros) if zeros.ndim == 1 else torch.equal(our_zeros.all(1), zeros.all(1))


def test_padding_row_is_zero() -> None:
    config = AutoConfig.for_model(**{**SMALL, "model_type": "llama", "pad_token_id": 5})
    fills = meta.build(config).fills["model.embed_tokens.weight"]
    values = initialize.draw(fills, 3, "model.embed_tokens.weight", 0, 0, 67 * 32).view(67, 32)
    assert values[5].count_nonzero() == 0
    assert values[4].count_nonzero() == 32


def test_seed_name_and_block_give_different_values() -> None:
    fills = (initialize.Fill("normal_", (0.0, 1.0), 0, 1000),)
    draws = [
        initialize.draw(fills, seed, name, block, 0, 100)
        for seed, name, block in [(1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1)]
    ]
    assert len({tuple(d.tolist()) for d in draws}) == 4
    assert torch.equal(draws[0], initialize.draw(fills, 1, "a", 0, 0, 100))


@given(
    shape=st.lists(st.integers(1, 2000), min_size=1, max_size=2).map(tuple),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_blocks_cover_a_range_and_lie_the_same_for_every_range(
    shape: tuple[int, ...], cuts: tuple[float, float]
) -> None:
    numel = torch.Size(shape).numel()
    start, stop = sorted(int(cut * numel) for cut in cuts)
    found = list(initialize.blocks(shape, start, stop))
    whole = list(initialize.blocks(shape, 0, numel))
    assert set(found) <= set(whole)
    assert whole[0][1] == 0 and whole[-1][2] == numel
    if start < stop:
        assert found[0][1] <= start and found[-1][2] >= stop
    else:
        assert len(found) <= 1
