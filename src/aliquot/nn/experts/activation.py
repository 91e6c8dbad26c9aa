"""What an expert does between its two products, and the gradient of that, written out where it is the usual one."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Activation(Protocol):
    def forward(self, before: Tensor) -> Tensor:
        """What the first product gave [n, W] -> what the second is given [n, I]."""
        ...

    def backward(self, before: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
        """`gradient` [n, I] -> into `out` that of `before` [n, W]; returns what `forward` gave."""
        ...


def activation_of(module: nn.Module) -> Activation:
    from transformers.integrations import moe

    usual = getattr(moe, "_default_apply_gate", None)  # a private name: without it the models' own code is run
    if module.has_gate and getattr(type(module), "_apply_gate", None) is usual and isinstance(module.act_fn, nn.SiLU):
        return GatedSilu()
    return OwnActivation(module)


class GatedSilu:
    """silu(gate) * up, of [gate, up]."""

    def forward(self, before: Tensor) -> Tensor:
        gate, up = before.chunk(2, 1)
        return F.silu(gate).mul_(up)

    def backward(self, before: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
        gate, up = before.chunk(2, 1)
        of_gate, of_up = out.chunk(2, 1)
        silu = F.silu(gate)
        torch.mul(gradient, silu, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return silu.mul_(up)


class OwnActivation:
    """Whatever the module's own code does, through autograd."""

    def __init__(self, module: Any) -> None:
        self._run = module._apply_gate if module.has_gate else module.act_fn

    def forward(self, before: Tensor) -> Tensor:
        found: Tensor = self._run(before)
        return found

    def backward(self, before: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
        with torch.enable_grad():
            first = before.detach().requires_grad_()
            acted = self.forward(first)
        (found,) = torch.autograd.grad(acted, first, gradient)
        out.copy_(found)
        return acted.detach()
