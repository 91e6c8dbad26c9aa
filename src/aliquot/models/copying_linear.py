"""Linear layers whose weight gradients are products of transposed copies, for models that are not compiled.

engines/model_kernels.py explains the reason and does the same to compiled models. A copy by torch takes twice as long
as a copy by a compiled kernel. The smaller copy is made: of the output's gradient, or of the input and the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from aliquot.machine.matmul import copy_pays

_MANY_TOKENS = 1 << 20


class CopyingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def copy_in_backward(model: nn.Module, copies: bool = True) -> None:
    """Turn the linear layers that learn into CopyingLinear, or back into plain ones; subclasses of nn.Linear stay."""
    for module in model.modules():
        # Changing the class, as FSDP2 does, keeps parameters, hooks and names.
        if copies and type(module) is nn.Linear and module.weight.requires_grad:
            if copy_pays(module.out_features, _MANY_TOKENS, module.in_features):
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
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient.matmul(weight) if needs_x else None,
            weight_gradient(rows, x.reshape(-1, x.shape[-1])) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient [T, O], x [T, I] -> [O, I]"""
    (tokens, outputs), inputs = gradient.shape, x.shape[1]
    if not copy_pays(outputs, tokens, inputs):
        return torch.mm(gradient.t(), x)
    if tokens * outputs <= (tokens + outputs) * inputs:
        return torch.mm(gradient.t().contiguous(), x)
    return torch.mm(x.t().contiguous(), gradient).t().contiguous()
