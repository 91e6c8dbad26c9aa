"""Files in which a model's weights have other names: a wider model's, those of older versions, of tied ones both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.core.errors import WeightsFileError
from aliquot.loaders.sharded import load_sharded

SMALL = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
Weights = dict[str, Tensor]


def inside_a_wider_model(weights: Weights) -> Weights:
    """Qwen3.5 with eyes, and the layer that predicts a second token."""
    renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in weights.items()}
    return renamed | {"mtp.norm.weight": torch.ones(32), "model.visual.x.weight": torch.ones(3)}


def behind_a_prefix(weights: Weights) -> Weights:
    return {f"language_model.{name}": each for name, each in weights.items()}


def as_tensorflow_had_them(weights: Weights) -> Weights:
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {
        next((name.replace(new, then) for new, then in old.items() if new in name), name): each
        for name, each in weights.items()
    }


def both_of_the_tied(weights: Weights) -> Weights:
    return weights | {"embed_out.weight": weights["gpt_neox.embed_in.weight"].clone()}


def the_head_of_the_tied(weights: Weights) -> Weights:
    return {("embed_out.weight" if "embed_in" in name else name): each for name, each in weights.items()}


def as_they_are_held(weights: Weights) -> Weights:
    return {name.replace("embed_out", "lm_head"): each for name, each in weights.items()}


@pytest.mark.parametrize(
    ("kind", "of_kind", "rename"),
    [
        (
            "qwen3_5_text",
            {
                "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
            inside_a_wider_model,
        ),
        (
            "llama4_text",
            {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 16},
            behind_a_prefix,
        ),
        ("bert", {"is_decoder": True}, as_tensorflow_had_them),
        ("gpt_neox", {"tie_word_embeddings": True}, both_of_the_tied),
        ("gpt_neox", {"tie_word_embeddings": True}, the_head_of_the_tied),
        ("gpt_neox", {}, as_they_are_held),
    ],
)  # fmt: skip
def test_names_that_transformers_knows(
    kind: str, of_kind: dict[str, Any], rename: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    model, file = saved(kind, of_kind, tmp_path)
    save_file({name: each.contiguous() for name, each in rename(load_file(file)).items()}, file, {"format": "pt"})
    of_transformers = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    loaded = load_sharded(empty(model), tmp_path).state_dict()
    assert loaded.keys() == of_transformers.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(of_transformers[name], weight) and torch.equal(loaded[name], weight), name


def test_of_two_tensors_that_would_be_one_none_is_taken(tmp_path: Path) -> None:
    model, file = saved("bert", {"is_decoder": True}, tmp_path)
    stored = as_tensorflow_had_them(load_file(file))
    name = "bert.embeddings.LayerNorm.gamma"
    save_file(stored | {name.removeprefix("bert."): torch.zeros_like(stored[name])}, file, {"format": "pt"})
    with pytest.raises(
        WeightsFileError, match=r"missing: bert\.embeddings\.LayerNorm\.weight; not of this model: .*gamma"
    ):
        load_sharded(empty(model), tmp_path)


def saved(kind: str, of_kind: dict[str, Any], directory: Path) -> tuple[nn.Module, Path]:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **of_kind}), dtype=torch.float32)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    model.save_pretrained(directory)
    return model, directory / "model.safetensors"


def empty(model: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(model.config)
    return made
