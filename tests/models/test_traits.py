"""What a narrow copy tells of a model, and that each document alone is what it is in transformers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from aliquot.core.errors import UnsupportedModelError
from aliquot.models import model_calls
from aliquot.models.meta import attention_widths
from aliquot.models.narrow import has_dropout, narrow, without_dropout
from aliquot.models.structure import fp32_weights, freeze_buffers
from aliquot.models.traits import LENGTHS, traits
from aliquot.nn.attention.document_attention import Documents

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 32}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
ROPES = {
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
}


def config_of(model_type: str, **more: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **{**SMALL, **more})


@pytest.mark.parametrize(
    ("model_type", "packs", "plain_head", "looks_up"),
    [
        ("llama", True, True, True),
        ("gemma2", True, False, False),  # its logits are capped and its embeddings scaled
        ("cohere", True, False, True),  # its logits are scaled
        ("deepseek_v3", True, True, True),  # values narrower than keys
        ("stablelm", False, True, True),  # attention of its own
        ("mamba", False, True, True),
        ("qwen3_next", False, True, True),  # mixes tokens by more than attention
        ("gpt2", False, True, True),  # drops probabilities by default
    ],
)
def test_traits(model_type: str, packs: bool, plain_head: bool, looks_up: bool) -> None:
    found = traits(AutoConfig.for_model(model_type))
    assert (found.packs, found.plain_head, found.looks_up) == (packs, plain_head, looks_up), found


@pytest.mark.parametrize(("settings", "attention"), [({}, "sdpa"), ({"alibi": True}, "eager")])
def test_unpacked_attention_equals_eager(settings: dict[str, Any], attention: str) -> None:
    """Falcon's way with torch's attention scales the biases of positions otherwise."""
    assert traits(AutoConfig.for_model("falcon", **settings)).attention == attention


def test_non_causal_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Not a causal language model"):
        traits(AutoConfig.for_model("xlm"))


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_factors_of_frequencies_are_as_many_as_a_narrow_head_has(share: float) -> None:
    """Phi-3.5 and Phi-4-mini: heads of 96 and 128."""
    factors = [1.0] * int(96 * share / 2)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors,
            "original_max_position_embeddings": 32, "partial_rotary_factor": share}  # fmt: skip
    config = config_of("phi3", hidden_size=384, rope_parameters=rope, original_max_position_embeddings=32)
    assert traits(config, longest=16).packs


class ForgetfulConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "forgetful_llama"


class Forgetful(LlamaForCausalLM):  # type: ignore[misc]
    config_class = ForgetfulConfig

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            self.model.embed_tokens.weight.mul_(0.5 if self.training else 1.0)
        return super().forward(*arguments, **options)


def test_model_that_changes_its_weights_is_refused() -> None:
    AutoConfig.register("forgetful_llama", ForgetfulConfig)
    AutoModelForCausalLM.register(ForgetfulConfig, Forgetful)
    with pytest.raises(
        UnsupportedModelError, match=r"changes its weights when it is called: model\.embed_tokens\.weight"
    ):
        traits(ForgetfulConfig(**SMALL))
    assert traits(config_of("rwkv", rescale_every=1)).looks_up  # would do so, too, but can be told not to


@pytest.mark.parametrize("rope", ROPES)
def test_rope_frequencies_follow_the_document(rope: str) -> None:
    model_type, more = ROPES[rope]
    config = config_of(model_type, **more)
    assert traits(config, 32).packs and not traits(config, 33).packs and not traits(config).packs
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    edges = (0, 60, 70, 150, 190, 222)  # long, short, longer, in between, as long as the original
    ids = torch.randint(4, 128, (edges[-1],))
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])
    with torch.no_grad():
        found = model_calls.logits(model, ids, positions, Documents(edges, None))[0]
        for start, stop in pairwise(edges):
            fresh = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            fresh.load_state_dict(model.state_dict())
            torch.testing.assert_close(found[start:stop], fresh(ids[None, start:stop]).logits[0], atol=1e-5, rtol=1e-4)


def test_narrow_keeps_kinds_and_switches() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=26, attention_dropout=0.1)
    small = narrow(config)
    assert small.hidden_size < 100 < config.hidden_size and small.vocab_size < 200
    assert set(small.layer_types) == set(config.layer_types) and len(small.layer_types) == small.num_hidden_layers == 4
    assert small.sliding_window < 13 and small.rms_norm_eps == config.rms_norm_eps
    assert has_dropout(small) and has_dropout(config) and not has_dropout(without_dropout(config))


def test_narrow_keeps_long_document_traits() -> None:
    """Llama 4 scales attention from the 8,192nd token on; clamps at the sizes of trained models change nothing."""
    assert narrow(AutoConfig.for_model("llama4_text")).floor_scale < LENGTHS[0]
    assert narrow(AutoConfig.for_model("olmo", clip_qkv=8.0)).clip_qkv == 1.0
    assert narrow(AutoConfig.for_model("olmo")).clip_qkv is None
    assert narrow(AutoConfig.for_model("dbrx", attn_config={"clip_qkv": 8.0})).attn_config.clip_qkv == 1.0


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
