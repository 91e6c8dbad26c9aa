"""Linear layers give the results and gradients of plain ones."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from aliquot.machine import matmul
from aliquot.models.linear_layers import CopyingLinear, copy_in_backward, fuse, fused_lora_layer, weight_gradient


@pytest.fixture(autouse=True)
def small_ones_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_FEWEST_COLUMNS", 64)
    monkeypatch.setattr(matmul, "_SMALLEST_RIGHT_SIDE", 1)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 320), (320, 64)])  # which side is copied
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_a_plain_layer(inputs: int, outputs: int, bias: bool) -> None:
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


def test_what_does_not_learn_is_small_or_has_been_derived_stays() -> None:
    class Derived(nn.Linear):
        pass

    frozen = nn.Linear(64, 64).requires_grad_(False)
    model = nn.ModuleList([frozen, nn.Linear(64, 8), Derived(64, 64)])
    copy_in_backward(model)
    assert [type(each) for each in model] == [nn.Linear, nn.Linear, Derived]


def test_a_planned_model_becomes_what_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    for copies, kind in ((True, CopyingLinear), (False, nn.Linear)):
        copy_in_backward(model, copies)
        assert type(model[0]) is kind


def test_few_tokens_are_multiplied_as_they_are() -> None:
    """A copy for them would take longer than it saves, and torch's own product is the same to the bit."""
    x, gradient = torch.randn(100, 256).bfloat16(), torch.randn(100, 64).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "_SMALLEST_RIGHT_SIDE", 100 * 256 + 1)
        assert torch.equal(weight_gradient(gradient, x), torch.mm(gradient.t(), x))


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
