"""What activation checkpointing computes twice, and that losses and gradients are those without it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.core.errors import UserError
from aliquot.models import model_calls
from aliquot.models.recompute import enable
from aliquot.nn.attention.base import Documents
from aliquot.nn.attention.document_attention import IMPLEMENTATION, attention_on, register
from tests.engines.cases import SMALL

EDGES = (0, 40, 45, 620)  # a bin, and blocks that see few keys and many
LLAMA: dict[str, Any] = {"model_type": "llama"}
MISTRAL = {"model_type": "mistral", "sliding_window": 200}
GEMMA2 = {"model_type": "gemma2", "query_pre_attn_scalar": 8}


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts attention as one operation, and its products outside of that, the only batched ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += func is torch.ops.aliquot.tiled_attention.default
        self.products += func is torch.ops.aten.bmm.default
        return func(*args, **(kwargs or {}))


@dataclass
class Pass:
    results: list[Tensor]
    forward: Products
    backward: Products


def trained(model: dict[str, Any], mode: str, dtype: torch.dtype) -> Pass:
    """The layers' output and all gradients of one row, and what forward and backward computed."""
    register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SMALL, **model})
    built = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
    enable(built, mode)  # type: ignore[arg-type]
    built.train()
    ids = torch.randint(0, 60, (EDGES[-1],), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(EDGES)])
    with Products() as forward:
        documents = Documents(EDGES, attention_on("cpu", selective=mode == "selective"))
        hidden = model_calls.hidden_states(built, ids, positions, documents)
    with Products() as backward:
        hidden.float().square().sum().backward()
    gradients = [weight.grad for weight in built.parameters() if weight.grad is not None]
    return Pass([hidden.detach(), *gradients], forward, backward)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(LLAMA, torch.bfloat16), (MISTRAL, torch.float32), (GEMMA2, torch.float32)],
    ids=["llama", "mistral", "gemma2"],
)
def test_results_are_those_without_it_to_the_bit(model: dict[str, Any], dtype: torch.dtype) -> None:
    expected = trained(model, "none", dtype)
    for mode in ("selective", "full"):
        found = trained(model, mode, dtype)
        for ours, theirs in zip(found.results, expected.results, strict=True):
            assert torch.equal(ours, theirs)


def test_selective_computes_attention_once_a_layer() -> None:
    """Backward has four products a tile and recomputes its scores, a fifth: a second forward pass would be two more."""
    plain, selective, full = (trained(LLAMA, mode, torch.float32) for mode in ("none", "selective", "full"))
    layers, products = SMALL["num_hidden_layers"], plain.forward.products  # two a tile and layer
    assert selective.forward.operations == layers
    assert selective.backward.operations == 0
    assert selective.backward.products == products // 2 * 5
    assert full.backward.products == plain.backward.products + products


def test_selective_is_refused_where_what_it_keeps_is_changed() -> None:
    """OLMo clamps queries, keys and values in place: kept, they are clamped before the clamp that stops gradients."""
    config = AutoConfig.for_model(**{**SMALL, "model_type": "olmo", "clip_qkv": 0.5})
    built = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=r"set train\.gradient_checkpointing to none or full"):
        enable(built, "selective")
    enable(built, "full")
