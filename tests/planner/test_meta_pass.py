"""Bytes and products of the meta pass, against a real pass on CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from aliquot.config.schema import RunConfig
from aliquot.engines.model_engine import ActivationMeter
from aliquot.models import meta, model_calls
from aliquot.models.backward_pass import enable_checkpointing
from aliquot.models.shaped_model import ShapedModel, shaped_model
from aliquot.models.structure import materialise
from aliquot.nn.attention.document_attention import Documents, attention_on
from aliquot.planner.meta_pass import micro_batch_costs
from aliquot.planner.micro_batch_cost import MicroBatchCost, Step
from tests.planner.shapes import GEMMA2, LLAMA, MISTRAL, QWEN3, planned_config

EDGES = (0, 300, 340, 400, 512)
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "mistral": MISTRAL}


def step(mode: str, precision: str = "bf16") -> Step:
    return Step(precision, mode, "cpu", looks_up=True, head_gradient=False)  # type: ignore[arg-type]


def cost_of(model: ShapedModel, how: Step, edges: tuple[int, ...], predicted: int) -> MicroBatchCost:
    return micro_batch_costs(model, how, edges, predicted)[0]


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.long), "mistral"])
def test_saved_bytes_match_a_real_forward_pass(name: str, mode: str) -> None:
    config = planned_config(MODELS[name])
    foreseen = cost_of(shaped_model(config), step(mode), EDGES, 500).saved_bytes

    saved_bytes = measured(meta.build(shaped_model(config).config).model, mode)
    # Alive, but not saved by autograd: the masks of the tiles and a few tensors [tokens, width], in and out.
    beside = 180_000 + 3 * 512 * 128 * 2
    assert 0.99 * saved_bytes <= foreseen <= 1.02 * saved_bytes + beside


def measured(model: nn.Module, mode: str) -> int:
    materialise(model, torch.device("cpu"), torch.device("cpu"), torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    enable_checkpointing(model, mode)  # type: ignore[arg-type]
    model.train()
    ids = torch.zeros(EDGES[-1], dtype=torch.int64)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    rows = embedding(ids).detach().requires_grad_(embedding.weight.requires_grad)
    saved = ActivationMeter(mode)  # type: ignore[arg-type]
    with saved.measure():
        model_calls.hidden_states(
            model, rows, ids, Documents(EDGES, attention_on("cpu", selective=mode == "selective"))
        )
    return saved.peak_bytes


def lora_config(folder: Path) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    whole = planned_config(LLAMA).model_dump(by_alias=True)
    return RunConfig(**{**whole, "model": {"path": str(folder)}, "adapter": {"r": 8}})


def test_saved_bytes_beside_a_frozen_model(tmp_path: Path) -> None:
    """Without gradients of their own its matrices keep no inputs."""
    config = lora_config(tmp_path)
    foreseen = cost_of(shaped_model(config), step("none"), EDGES, 500).saved_bytes
    of_whole = cost_of(shaped_model(planned_config(LLAMA)), step("none"), EDGES, 500).saved_bytes
    saved_bytes = measured(meta.build(shaped_model(config).config, adapter=config.adapter).model, "none")
    assert 0.99 * saved_bytes <= foreseen <= 1.02 * saved_bytes + 180_000 + 3 * 512 * 128 * 2
    assert foreseen != of_whole


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "model",
    [LLAMA, GEMMA2, *(pytest.param(model, marks=pytest.mark.long) for model in (QWEN3, MISTRAL))],
    ids=lambda model: model["model_type"],
)
def test_layers_add_up(model: dict[str, object]) -> None:
    """Few layers are run; twice as many must cost what running them all would."""
    few = cost_of(shaped_model(planned_config(model)), step("none"), EDGES, 500)
    more = cost_of(shaped_model(planned_config({**model, "num_hidden_layers": 8})), step("none"), EDGES, 500)
    whole = cost_of(shaped_model(planned_config({**model, "num_hidden_layers": 2})), step("none"), EDGES, 500)
    assert more.saved_bytes - few.saved_bytes == 2 * (few.saved_bytes - whole.saved_bytes)
    assert more.saved_bytes > few.saved_bytes > whole.saved_bytes


def test_checkpointing_saves_memory_and_costs_products() -> None:
    model = shaped_model(planned_config(LLAMA))
    costs = [cost_of(model, step(mode), EDGES, 500) for mode in ("none", "selective", "full")]
    saved = [cost.saved_bytes for cost in costs]
    assert saved[0] > saved[1] > saved[2]
    products = [sum(v * k[1] * k[2] * k[3] * k[4] for k, v in c.backward.items() if k[0] == "matmul") for c in costs]
    assert products[2] > products[1] >= products[0]


@pytest.mark.parametrize(
    ("frozen", "part"),
    [([], 1.0), (["model.embed_tokens.*", "model.layers.[01].*"], 0.75), (["lm_head.*"], 0.9), (None, 0.7)],
)
def test_products_match_the_flops_formula(frozen: list[str] | None, part: float, tmp_path: Path) -> None:
    """6 x matmul parameters x tokens where all learn, attention apart: the dispatch mode misses no product. None: an
    adapter."""
    config = lora_config(tmp_path) if frozen is None else planned_config(LLAMA, train={"freeze": frozen})
    model = shaped_model(config)
    cost = cost_of(model, step("none"), (0, 512), 512)
    flops = sum(
        2 * v * k[1] * k[2] * k[3] * k[4]
        for work in (cost.forward, cost.backward)
        for k, v in work.items()
        if k[0] == "matmul" and k[1] == 1
    )
    # The first layer's own inputs need no gradient where nothing below it learns; the formula goes by whole weights.
    assert flops == pytest.approx(
        model.built.matmul_flops * 512, rel=0.01 if not frozen and frozen is not None else 0.05
    )
    multiplied = sum(
        weight.numel()
        for name, weight in model.built.model.named_parameters()
        if weight.ndim == 2 and "embed_tokens" not in name
    )
    assert model.built.matmul_flops / (6 * multiplied) == pytest.approx(part, abs=0.07)


def test_logits_exist_once_and_in_the_compute_dtype() -> None:
    """As what the plan's forward pass holds beyond what is saved."""
    model = shaped_model(planned_config(LLAMA))
    cost = cost_of(model, step("none"), (0, 512), 512)
    logits = 512 * model.shape.vocabulary * 2
    assert logits <= cost.forward_bytes - cost.saved_bytes <= logits + (8 << 20)
