"""The fused layers of an adapter give the results and gradients of peft's own."""

from __future__ import annotations

import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from aliquot.models.adapter import fuse, fused_lora_layer


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
