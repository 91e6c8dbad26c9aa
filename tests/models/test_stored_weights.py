"""Files with weights of other names or layouts: single experts, older versions, tied weights, parts of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from aliquot.config.schema import ModelSection
from aliquot.core.errors import UserError, WeightsFileError
from aliquot.core.on_rank_0 import RankGroup, SingleRank
from aliquot.loaders.sharded import load_sharded
from aliquot.models.export import ExportOptions, export
from aliquot.models.load import LoadOptions, load_weights
from aliquot.models.source import resolve
from aliquot.models.stored_weights import Published, PublishedParts, StoredNames, published_of
from aliquot.tensor_io.parts import Part, row_ranges
from tests.tensor_io.world import MemoryStore, run_world

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 5, "tie_word_embeddings": True},
    "olmoe": {"num_experts": 5},
    "deepseek_v3": {
        "n_routed_experts": 5, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
    "gpt_neox": {},  # whose head has another name
}  # fmt: skip


class Held(MemoryStore):
    """A rank's rows of a model's weights; `direct`: they can be seen where they lie."""

    def __init__(self, weights: dict[str, Tensor], rank: int, world_size: int, direct: bool = False) -> None:
        super().__init__({})
        for name, weight in weights.items():
            start, stop = row_ranges(tuple(weight.shape), world_size)[rank]
            part = Part(name, tuple(weight.shape), "weight", start, stop)
            self.values[part] = weight.reshape(-1)[start:stop].clone()
        self._direct = direct

    def view(self, part: Part) -> Tensor | None:
        return self.values[part] if self._direct else None

    def equals(self, weights: dict[str, Tensor]) -> bool:
        return all(
            torch.equal(values, weights[part.name].reshape(-1)[part.start : part.stop])
            for part, values in self.values.items()
        )


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    buffers = {name: model.get_buffer(name) for name in model.state_dict() if name in dict(model.named_buffers())}
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | buffers


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, folder = model_of(request.param), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.few(8)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_load_and_export_equal_transformers(saved: tuple[Any, Path], tmp_path: Path, world: int, direct: bool) -> None:
    model, folder = saved
    weights = weights_of(model)
    tensors = [(name, tuple(weight.shape)) for name, weight in weights.items()]
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tie_word_embeddings else {}
    published = published_of(model, tensors)
    assert published is not None
    assert any(".experts.4." in each.name or each.name == "embed_out.weight" for each in published)

    def work(ranks: RankGroup) -> int:
        store = Held({name: torch.zeros_like(w) for name, w in weights.items()}, ranks.rank, world, direct)
        read_bytes = load_weights(store, folder, tensors, tied, ranks, LoadOptions(published=published))
        assert store.equals(weights)
        config = {"config.json": (folder / "config.json").read_bytes()}
        export(store, tensors, tmp_path / "out", torch.float32, config, ranks, ExportOptions(published=published))
        return read_bytes

    # Each byte is read by one rank.
    assert sum(run_world(world, work)) == sum(4 * weight.numel() for weight in weights.values())
    stored, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in weights.items())


def test_the_layout_of_the_model_itself_is_loaded_too(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, _ = saved
    weights = weights_of(model)
    tensors = [(name, tuple(weight.shape)) for name, weight in weights.items()]
    export(Held(weights, 0, 1), tensors, tmp_path / "out", torch.float32, {}, SingleRank())
    store = Held({name: torch.zeros_like(weight) for name, weight in weights.items()}, 0, 1)
    load_weights(
        store, tmp_path / "out", tensors, {}, SingleRank(), LoadOptions(published=published_of(model, tensors))
    )
    assert store.equals(weights)


def test_for_other_peoples_scripts(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    loaded = load_sharded(empty, folder)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        ("gpt_neox", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.masked_bias"]),
        ("deepseek_v3", ["model.layers.61.eh_proj.weight", "model.layers.61.mlp.experts.0.up_proj.weight"]),
    ],
)
def test_tensors_ignored_by_transformers_are_skipped(kind: str, beside: list[str], tmp_path: Path) -> None:
    model, told = model_of(kind), []
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors") | {name: torch.zeros(3) for name in beside}
    save_file(stored, tmp_path / "model.safetensors")
    weights = weights_of(model)
    tensors = [(name, tuple(weight.shape)) for name, weight in weights.items()]
    store = Held({name: torch.zeros_like(weight) for name, weight in weights.items()}, 0, 1)
    options: dict[str, Any] = {"published": published_of(model, tensors), "inform": told.append}
    load_weights(
        store, tmp_path, tensors, {}, SingleRank(), LoadOptions(names=StoredNames.from_model(model), **options)
    )
    assert store.equals(weights)
    assert told == [f"{tmp_path}: 2 tensors that transformers does not load are left out, {min(beside)} for one"]
    with pytest.raises(WeightsFileError, match=f"not of this model: .*{beside[0]}"):
        load_weights(store, tmp_path, tensors, {}, SingleRank(), LoadOptions(**options))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    loaded = load_sharded(empty, tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_differing_tied_weights_are_refused(tmp_path: Path) -> None:
    """As a fine-tune leaves them that untied its head, and not its config.json: transformers would not tie them."""
    model = model_of("qwen3_moe")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    weights, tied = weights_of(model), {"lm_head.weight": "model.embed_tokens.weight"}
    tensors = [(name, tuple(weight.shape)) for name, weight in weights.items()]

    def load(ranks: RankGroup) -> None:
        store = Held({name: torch.zeros_like(weight) for name, weight in weights.items()}, ranks.rank, 2)
        load_weights(store, tmp_path, tensors, tied, ranks, LoadOptions(published=published_of(model, tensors)))

    save_file(stored, tmp_path / "model.safetensors")
    assert run_world(2, load) == [None, None]
    stored["lm_head.weight"][0, 3] += 1  # the first rank's share
    save_file(stored, tmp_path / "model.safetensors")
    for error in run_world(2, load):
        assert isinstance(error, WeightsFileError) and "set tie_word_embeddings to false" in str(error)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    index = {name: "model.safetensors" for name in load_file(tmp_path / "model.safetensors") if ".3.w2" not in name}
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001.safetensors")
    of_file = {name: "model-00001.safetensors" for name in index}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of_file}))
    weights = weights_of(model)
    tensors = [(name, tuple(weight.shape)) for name, weight in weights.items()]
    with pytest.raises(WeightsFileError, match=r"missing: model\.layers\.0\.block_sparse_moe\.experts\.3\.w2\.weight"):
        load_weights(
            Held(weights, 0, 1),
            tmp_path,
            tensors,
            {},
            SingleRank(),
            LoadOptions(published=published_of(model, tensors)),
        )


def test_models_with_equal_stored_and_held_tensors() -> None:
    for kind, more in (("llama", {}), ("gpt_oss", {"num_local_experts": 4})):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **more}))
        assert published_of(model, [(name, tuple(p.shape)) for name, p in model.named_parameters()]) is None


def test_parts_end_at_published_tensor_borders() -> None:
    """A rank's part begins and ends anywhere: inside of an expert, too."""
    weight = torch.arange(24.0).view(2, 4, 3)
    published = [
        Published(f"{expert}.{name}", (2, 3), "w", 12 * expert + 6 * half)
        for expert in range(2)
        for half, name in enumerate(("gate", "up"))
    ]

    some = MemoryStore({Part("w", (2, 4, 3), "weight", 4, 15): weight.view(-1)[4:15]})
    cut = PublishedParts(some, published)
    assert [(part.name, part.start, part.stop) for part in cut.parts()] == [
        ("0.gate", 4, 6), ("0.up", 0, 6), ("1.gate", 0, 3),
    ]  # fmt: skip
    out = torch.empty(2)
    cut.read(cut.parts()[1], 3, out)
    assert out.tolist() == [9, 10]


NARROW = {
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
def test_names_known_to_transformers_load(
    kind: str, of_kind: dict[str, Any], rename: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    model, file = saved_as(kind, of_kind, tmp_path)
    save_file({name: each.contiguous() for name, each in rename(load_file(file)).items()}, file, {"format": "pt"})
    of_transformers = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    loaded = load_sharded(empty(model), tmp_path).state_dict()
    assert loaded.keys() == of_transformers.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(of_transformers[name], weight) and torch.equal(loaded[name], weight), name


def test_colliding_tensors_are_both_refused(tmp_path: Path) -> None:
    model, file = saved_as("bert", {"is_decoder": True}, tmp_path)
    stored = as_tensorflow_had_them(load_file(file))
    name = "bert.embeddings.LayerNorm.gamma"
    save_file(stored | {name.removeprefix("bert."): torch.zeros_like(stored[name])}, file, {"format": "pt"})
    with pytest.raises(
        WeightsFileError, match=r"missing: bert\.embeddings\.LayerNorm\.weight; not of this model: .*gamma"
    ):
        load_sharded(empty(model), tmp_path)


def saved_as(kind: str, of_kind: dict[str, Any], directory: Path) -> tuple[nn.Module, Path]:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**NARROW, **of_kind}), dtype=torch.float32)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    model.save_pretrained(directory)
    return model, directory / "model.safetensors"


def empty(model: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(model.config)
    return made


_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
# How each type differs from SMALL and _VISION in the part for text and in the part for images.
WITH_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"pad_token_id": 0}, {}),
    "llama4": (
        {"num_local_experts": 4, "intermediate_size_mlp": 24, "moe_layers": [1]},
        {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "mistral3": ({}, {}),  # whose head is tied, although the type of its text part unties it
    "qwen3_5_moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 12, "linear_num_key_heads": 2,
         "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]},
        {"depth": 1, "num_heads": 2, "out_hidden_size": 16},
    ),
    "idefics3": ({}, {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", WITH_IMAGES)
@torch.no_grad()
def test_a_text_part_computes_the_same_logits_loaded_and_exported(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain, (text, vision) = AutoConfig.for_model(kind), WITH_IMAGES[kind]
    whole = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(
            kind,
            text_config={**SMALL, **text, "model_type": plain.text_config.model_type},
            vision_config={**_VISION, **vision, "model_type": plain.vision_config.model_type},
            image_token_id=39,
        )
    ).eval()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.1)
    whole.save_pretrained(tmp_path / "whole")
    tokens = torch.randint(3, 30, (1, 20))
    expected = whole(input_ids=tokens).logits
    config = resolve(ModelSection(path=str(tmp_path / "whole"))).config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    loaded = load_sharded(empty, tmp_path / "whole").eval()
    assert torch.equal(loaded(input_ids=tokens).logits, expected)
    weights = weights_of(loaded)
    tensors = [(name, tuple(weight.shape)) for name, weight in weights.items()]
    config.save_pretrained(tmp_path)
    files = {"config.json": (tmp_path / "config.json").read_bytes()}
    options = ExportOptions(published=published_of(loaded, tensors))
    export(Held(weights, 0, 1), tensors, tmp_path / "export", torch.float32, files, SingleRank(), options)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(again(input_ids=tokens).logits, expected)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "mllama", "cohere2_vision"])
def test_without_a_text_model_the_type_is_named(kind: str) -> None:
    with pytest.raises(UserError, match=f"model_type '{kind}' is not a causal .* what its text part computes"):
        resolve(ModelSection(config=AutoConfig.for_model(kind).to_dict()))
