"""What the backward pass computes twice, and that results are those of plain layers.

The loss that balances a mixture's routers is transformers' own, with gradients, on both ways of engines to call it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from aliquot.core.errors import UserError
from aliquot.machine import matmul
from aliquot.models import model_calls
from aliquot.models.backward_pass import CopyingLinear, copy_in_backward, enable_checkpointing, weight_gradient
from aliquot.models.narrow import narrow
from aliquot.models.traits import redraw
from aliquot.nn.attention.document_attention import IMPLEMENTATION, AttentionBackend, Documents, attention_on, register
from aliquot.nn.attention.tiled_attention import TiledAttention
from aliquot.nn.experts.expert_modules import mean_balance, take_balance
from aliquot.nn.logits_gradient import IGNORE
from tests.engines.cases import SMALL


@pytest.fixture
def small_ones_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_FEWEST_COLUMNS", 64)
    monkeypatch.setattr(matmul, "_SMALLEST_RIGHT_SIDE", 1)


@pytest.mark.usefixtures("small_ones_pay")
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 320), (320, 64)])  # which side is copied
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_equal_a_plain_layer(inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64))
    copying = copy.deepcopy(plain)
    copy_in_backward(copying)
    assert type(copying[0]) is CopyingLinear and isinstance(copying[0], nn.Linear)
    x = torch.randn(3, 40, inputs, dtype=torch.float64, requires_grad=True)
    kept = torch.randn(3, 40, outputs, dtype=torch.float64)
    found = []
    for model in (plain, copying):
        result = model(x)
        of_all = torch.autograd.grad((result * kept).sum(), [x, *model.parameters()])
        found.append([result, *of_all])
        assert all(each.is_contiguous() for each in of_all)
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("small_ones_pay")
def test_frozen_small_and_derived_layers_stay() -> None:
    class Derived(nn.Linear):
        pass

    frozen = nn.Linear(64, 64).requires_grad_(False)
    model = nn.ModuleList([frozen, nn.Linear(64, 8), Derived(64, 64)])
    copy_in_backward(model)
    assert [type(each) for each in model] == [nn.Linear, nn.Linear, Derived]


@pytest.mark.usefixtures("small_ones_pay")
def test_copying_layers_can_be_reverted() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    for copies, kind in ((True, CopyingLinear), (False, nn.Linear)):
        copy_in_backward(model, copies)
        assert type(model[0]) is kind


@pytest.mark.usefixtures("small_ones_pay")
def test_few_tokens_are_multiplied_as_they_are() -> None:
    """A copy for them would take longer than it saves, and torch's own product is the same to the bit."""
    x, gradient = torch.randn(100, 256).bfloat16(), torch.randn(100, 64).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "_SMALLEST_RIGHT_SIDE", 100 * 256 + 1)
        assert torch.equal(weight_gradient(gradient, x), torch.mm(gradient.t(), x))


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
    enable_checkpointing(built, mode)  # type: ignore[arg-type]
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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "dtype"),
    [(LLAMA, torch.bfloat16), (MISTRAL, torch.float32), (GEMMA2, torch.float32)],
    ids=["llama", "mistral", "gemma2"],
)
def test_recomputation_changes_no_bit(model: dict[str, Any], dtype: torch.dtype) -> None:
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


def test_selective_refuses_modules_that_change_saved_tensors() -> None:
    """OLMo clamps queries, keys and values in place: kept, they are clamped before the clamp that stops gradients."""
    config = AutoConfig.for_model(**{**SMALL, "model_type": "olmo", "clip_qkv": 0.5})
    built = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=r"set train\.gradient_checkpointing to none or full"):
        enable_checkpointing(built, "selective")
    enable_checkpointing(built, "full")


@pytest.mark.parametrize("backend", [TiledAttention(), None], ids=["packed", "a call each"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_auxiliary_loss_equals_transformers(model_type: str, backend: AttentionBackend | None) -> None:
    config = narrow(AutoConfig.for_model(model_type, output_router_logits=True, router_aux_loss_coef=0.5))
    register()
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    redraw(stock)
    ids = torch.arange(20) % 7 + 4
    output = stock(input_ids=ids[None], labels=ids[None], use_cache=False)
    output.loss.backward()

    implementation = "eager" if backend is None else IMPLEMENTATION
    own = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)
    own.load_state_dict(stock.state_dict())
    # A padded tail, which is no document, does not count.
    row, edges = torch.cat([ids, torch.zeros(3, dtype=torch.int64)]), (0, 20, 23)
    labels = torch.cat([ids[1:], torch.full((4,), IGNORE)])
    documents = Documents(edges, backend)
    positions = torch.cat([torch.arange(20), torch.arange(3)])
    _, summed = model_calls.whole_logits_loss(own, row, positions, labels, documents)
    model_calls.with_auxiliary(own, summed / 19, 1 / 19, labels, documents).backward()
    noted = take_balance(own)
    assert noted[1] == 19 and take_balance(own) == []
    other = [noted[0] * 4, noted[1] * 2]  # of a rank with twice as many tokens and twice the loss
    assert mean_balance([noted, [], other])["router_loss"] == pytest.approx(
        0.5 * float(output.aux_loss.detach()) * 5 / 3
    )
    for (name, ours), theirs in zip(own.named_parameters(), stock.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_auxiliary_loss_is_off_by_default() -> None:
    summed = torch.ones(())
    assert model_calls.with_auxiliary(nn.Linear(1, 1), summed, 1.0, torch.zeros(4), Documents((0, 4), None)) is summed
