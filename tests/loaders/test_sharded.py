from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.core.errors import UserError
from aliquot.loaders import sharded
from aliquot.loaders.sharded import load_sharded
from aliquot.tensor_io.transfer import Progress
from tests.engines.cases import SMALL
from tests.processes import run_ranks

MODELS = {
    "llama": ({"model_type": "llama", "tie_word_embeddings": False}, torch.float32),
    "qwen2-tied": ({"model_type": "qwen2", "tie_word_embeddings": True}, torch.bfloat16),
}


def source(folder: Path, name: str) -> Path:
    given, dtype = MODELS[name]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SMALL, **given}), dtype=dtype)
    model.save_pretrained(folder / name, max_shard_size="20KB")
    return folder / name


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_equals_from_pretrained_on_every_mesh(tmp_path: Path, world_size: int) -> None:
    names = list(MODELS) if world_size == 2 else ["qwen2-tied"]
    for name in names:
        source(tmp_path, name)
    run_ranks(Path(__file__).with_name("sharded_worker.py"), world_size, tmp_path, *names)


def on_meta(directory: Path) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)


def test_without_a_process_group(tmp_path: Path) -> None:
    directory = source(tmp_path, "qwen2-tied")
    told: list[Progress] = []
    model = load_sharded(on_meta(directory), str(directory), watch=told.append)
    original = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for (name, weight), (expected_name, expected) in zip(
        model.named_parameters(), original.named_parameters(), strict=True
    ):
        assert name == expected_name and torch.equal(weight, expected)
    assert told[-1].done_bytes == told[-1].total_bytes == 2 * sum(p.numel() for p in original.parameters())


def test_buffers_with_values_keep_them(tmp_path: Path) -> None:
    directory = source(tmp_path, "llama")
    model = on_meta(directory)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.original_inv_freq = torch.full((4,), 3.0)
    assert torch.equal(load_sharded(model, directory).model.rotary_emb.inv_freq, torch.full((4,), 3.0))


def test_what_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    directory = source(tmp_path, "llama")
    with pytest.raises(UserError, match="needs a mesh"):
        load_sharded(AutoConfig.from_pretrained(directory), directory)
    model = on_meta(directory)
    model.register_buffer("counts", torch.zeros(3, dtype=torch.int64, device="meta"))
    with pytest.raises(UserError, match="buffer counts"):
        load_sharded(model, directory)
    model = on_meta(directory)
    model.register_buffer("mask", torch.zeros(3, device="meta"), persistent=False)
    with pytest.raises(UserError, match="does not compute its buffers mask"):
        load_sharded(model, directory)
    model = on_meta(directory)
    model.model.layers[0].extra = nn.Linear(2, 2, device="meta")
    with pytest.raises(UserError, match=r"missing: model\.layers\.0\.extra\.weight"):
        load_sharded(model, directory)


def test_names_of_wrapped_modules() -> None:
    assert sharded._plain("_orig_mod.layers.0._checkpoint_wrapped_module.norm.weight") == "layers.0.norm.weight"
