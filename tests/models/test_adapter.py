"""The fused layers of an adapter give the results and gradients of peft's own.

Rows for new tokens: the distribution of transformers, the same at any world size, in a run and in its export.
"""

from __future__ import annotations

import copy
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from aliquot.config.adapter_section import AdapterSection
from aliquot.core.on_rank_0 import SingleRank
from aliquot.models.adapter import adapt
from aliquot.models.load import LoadOptions, load_weights, new_rows
from aliquot.models.lora_layers import fuse, fused_lora_layer
from aliquot.models.narrow import narrow
from aliquot.nn.experts.sorted_experts import IMPLEMENTATION
from aliquot.nn.experts.sorted_experts import register as register_experts
from aliquot.tensor_io.bytemap import ByteMap
from tests import plain, runs
from tests.tensor_io.world import FakeStore, Tensors, run_world


def test_a_result_may_be_changed_in_place() -> None:
    """As OLMo does: `q_proj(x).clamp_(...)`."""
    torch.manual_seed(0)
    base, x = nn.Sequential(nn.Linear(8, 12)), torch.randn(2, 5, 8)
    results: list[list[Tensor]] = []
    for fused in (True, False):
        settings = LoraConfig(r=4, target_modules=["0"])
        if fused:
            fuse(settings)
        torch.manual_seed(1)
        layer = get_peft_model(copy.deepcopy(base), settings).base_model.model[0]  # type: ignore[arg-type]
        assert isinstance(layer, fused_lora_layer()) is fused
        nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
        given = x.clone().requires_grad_()
        result = layer(given).clamp_(-0.5, 0.5)
        result.square().sum().backward()
        results.append([result, given.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_moe", "nemotron_h"])
def test_experts_learn_as_with_peft(kind: str) -> None:
    """gpt_oss has transposed weights with biases; nemotron_h has no gates."""
    config = narrow(AutoConfig.for_model(kind))
    adapter = AdapterSection(r=3, alpha=12.0, experts=True, target_modules=["q_proj", "v_proj"])
    ours, theirs = (AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2))
    register_experts()
    ours.set_experts_implementation(IMPLEMENTATION)
    adapt(ours, adapter)
    for module in ours.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_meta:
                setattr(module, name, nn.Parameter(torch.empty_like(weight, device="cpu")))
    plain.add_lora(theirs, adapter)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for (name, weight), (same_name, same) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert name == same_name and weight.requires_grad is same.requires_grad is (".lora_" in name)
            same.copy_(weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1))
    ids = torch.randint(0, config.vocab_size, (1, 50), generator=generator)
    losses = [model(input_ids=ids, labels=ids).loss for model in (ours, theirs)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    adapted = [name for name, weight in ours.named_parameters() if weight.grad is not None]
    assert any("experts" in name for name in adapted)
    for name in adapted:
        torch.testing.assert_close(ours.get_parameter(name).grad, theirs.get_parameter(name).grad, msg=name)


MODEL: Tensors = [("embed.weight", (11, 4)), ("head.bias", (11,)), ("norm.weight", (4,))]
MORE = [f"<more {number}>" for number in range(100)]
STORED: Tensors = [("embed.weight", (8, 4)), ("head.bias", (8,)), ("norm.weight", (4,))]


def stored(directory: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    tensors = {name: torch.randn(shape) for name, shape in STORED}
    save_file(tensors, directory / "model.safetensors")
    return tensors


def filled(directory: Path, ranks: Any) -> dict[str, list[tuple[int, list[float]]]]:
    store = FakeStore(MODEL, ranks.rank, ranks.world_size, zeros=True)
    load_weights(store, directory, MODEL, {}, ranks, LoadOptions(may_grow=["embed.weight", "head.bias"], seed=5))
    return {part.name: [(part.start, held.tolist())] for part, held in store.values.items() if part.kind == "weight"}


def whole(of_ranks: list[Any], name: str) -> torch.Tensor:
    pieces = sorted(piece for of_rank in of_ranks for piece in of_rank.get(name, []))
    return torch.tensor([value for _, values in pieces for value in values])


@pytest.mark.parametrize("world", [2, 3])
def test_added_rows_are_equal_at_any_world_size(tmp_path: Path, world: int) -> None:
    before = stored(tmp_path)
    alone, together = (
        run_world(1, lambda ranks: filled(tmp_path, ranks)),
        run_world(world, lambda r: filled(tmp_path, r)),
    )
    for name, shape in MODEL:
        found = whole(alone, name).view(shape)
        assert torch.equal(found, whole(together, name).view(shape))
        assert torch.equal(found[: len(before[name])], before[name])
        added, mean = found[len(before[name]) :], before[name].mean(0)
        assert torch.allclose(added, mean.expand_as(added), atol=1e-3)
        assert len(added.unique(dim=0)) == len(added)


def test_missing_rows_without_added_tokens_are_refused(tmp_path: Path) -> None:
    stored(tmp_path)
    with pytest.raises(Exception, match=r"of the wrong shape: embed.weight is \[8, 4\] instead of \[11, 4\]"):
        load_weights(FakeStore(MODEL, zeros=True), tmp_path, MODEL, {}, SingleRank())


def test_added_rows_have_the_distribution_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mixing = torch.randn(6, 6)
    old = torch.randn(200, 6) @ mixing + 0.01 * torch.randn(6)
    save_file({"embed.weight": old}, tmp_path / "model.safetensors")
    entry = ByteMap.from_directory(tmp_path).entries["embed.weight"]
    ours = torch.cat([new_rows(entry, f"seed:{batch}", 500, SingleRank()) for batch in range(8)])
    sizes = {"hidden_size": 6, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=200, tie_word_embeddings=True, **sizes))
    model.get_input_embeddings().weight = nn.Parameter(old.clone())
    theirs = model.resize_token_embeddings(4200, mean_resizing=True).weight[200:].detach()
    assert not torch.equal(theirs[0], theirs[1])  # their covariance was positive definite, too
    for rows in (ours, theirs):
        centred = (rows - old.mean(0)).double()
        spread = 1e-9**0.5 * old.std(0).double()
        assert ((centred.mean(0) / spread).abs() < 0.1).all()
        found = centred.T @ centred / len(rows) / (spread[:, None] * spread)
        assert torch.allclose(found, torch.corrcoef(old.T).double(), atol=0.1)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    config = runs.write_config(folder, "tied", train={"max_steps": 1})
    runs.trained(config, "model.config.tie_word_embeddings=true")
    runs.trained(config, "run.name=apart", f"run.directory={folder}/apart")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("added", [[], ["<think>"]], ids=["", "added"])
def test_token_without_a_row_gets_one_in_training(pretrained: Path, tmp_path: Path, added: list[str]) -> None:
    """As Gemma 3's has."""
    source = tmp_path / "model"
    copytree(pretrained / "tied" / "export", source)
    rows = len(load_file(source / "model.safetensors")["model.embed_tokens.weight"])
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([f"<image {number}>" for number in range(rows + 1 - len(tokenizer))])
    tokenizer.save_pretrained(source)
    model = {"config": None, "path": str(source), "add_tokens": added}
    config = runs.write_config(
        tmp_path, "run", model=model, data={"tokenizer_vocab_size": None}, train={"max_steps": 1}
    )
    runs.trained(config)
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")["model.embed_tokens.weight"]
    assert len(exported) == (rows + 1 + len(added) if added else rows)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tied", "apart"])
@pytest.mark.parametrize("engine", ["host", "fsdp"])
def test_a_run_with_new_tokens_loads_in_plain_transformers(
    pretrained: Path, tmp_path: Path, kind: str, engine: str
) -> None:
    source = pretrained / kind / "export"
    text = runs.write_text(tmp_path)
    text.write_text("".join(f"<|turn|>{line}<think>\n" for line in text.read_text().splitlines()))
    settings: dict[str, Any] = {
        "model": {
            "config": None,
            "path": str(source),
            "add_tokens": ["<think>", *MORE],
            "add_special_tokens": ["<|turn|>"],
        },
        "data": {"path": str(text), "tokenizer_vocab_size": None},
        "train": {"max_steps": 3, "learning_rate": 1e-2},
        "shard": {"engine": engine},
        "checkpoint": {"every": 2},
    }
    curves = []
    for ranks in (1, 2):
        config = runs.write_config(tmp_path / str(ranks), "run", **{**settings, "launch": {"ranks": ranks}})
        runs.trained(config, f"data.path={text}")
        curves.append(runs.curve(tmp_path / str(ranks) / "run"))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    exported = tmp_path / "2/run/export"
    tokenizer, model = AutoTokenizer.from_pretrained(exported), AutoModelForCausalLM.from_pretrained(exported)
    old = len(AutoTokenizer.from_pretrained(source))
    ids = tokenizer.encode("<|turn|>the<think>", add_special_tokens=False)
    assert {ids[0], ids[-1]} == {old, old + 101}
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "the<think>"
    before = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    rows = model.get_input_embeddings().weight
    assert len(rows) == model.config.vocab_size == old + 102 > len(before)  # which were rounded up
    assert (model.get_output_embeddings().weight is rows) == (kind == "tied")
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()
