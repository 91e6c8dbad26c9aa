"""Linear layers whose weight gradients are products of transposed copies, for models that are not compiled.

See engines/model_kernels.py, which does the same to compiled ones, for why. torch's own copy takes twice as long
as a compiled kernel's, so the smaller one is made: of the gradient of the output, or of the input and of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from aliquot.machine.matmul import copy_pays

_MANY = 1 << 20  # tokens


class CopyingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def copy_in_backward(model: nn.Module, copies: bool = True) -> None:
    """Make CopyingLinear of the model's linear layers that learn, or plain ones again; those that others have derived
    from them stay."""
    for module in model.modules():
        # As FSDP2 does: parameters, hooks and names are those that were.
        if copies and type(module) is nn.Linear and module.weight.requires_grad:
            if copy_pays(module.out_features, _MANY, module.in_features):
                module.__class__ = CopyingLinear
        elif not copies and type(module) is CopyingLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


class _Linear(torch.autograd.Function):
    """x [..., I], weight [O, I], bias [O] -> [..., O]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient.matmul(weight) if of_x else None,
            weight_gradient(rows, x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient [T, O], x [T, I] -> [O, I]"""
    (tokens, outputs), inputs = gradient.shape, x.shape[1]
    if not copy_pays(outputs, tokens, inputs):
        return torch.mm(gradient.t(), x)
    if tokens * outputs <= (tokens + outputs) * inputs:
        return torch.mm(gradient.t().contiguous(), x)
    return torch.mm(x.t().contiguous(), gradient).t().contiguous()
