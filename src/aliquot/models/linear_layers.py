"""Linear layers with gradients of their own: products of transposed copies, and fused LoRA.

CopyingLinear, for models that are not compiled, multiplies transposed copies for the gradient of its weight.
engines/model_kernels.py explains the reason and does the same to compiled models. A copy by torch takes twice as long
as a copy by a compiled kernel. The smaller copy is made: of the output's gradient, or of the input and the result.

The fused LoRA layer computes the sums of peft's plain layer inside of the matrix products. peft scales and adds in
separate passes over results of the layer's size, which take a fifth of a step on a CPU. peft accepts custom layers by
`_register_custom_module`, which it calls experimental. Without that function, and for dropout, merged weights and all
other variants, the forward pass of peft runs.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from aliquot.machine.matmul import copy_pays

if TYPE_CHECKING:
    from peft import LoraConfig


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


def fuse(settings: LoraConfig) -> None:
    """Make peft create FusedLoraLinear for linear layers."""
    register = getattr(settings, "_register_custom_module", None)
    if register is not None:
        register({nn.Linear: fused_lora_layer()})


@cache
def fused_lora_layer() -> Any:
    """Return peft's linear LoRA layer with a fused forward pass; a class made here, because peft is optional."""
    from peft.tuners.lora import Linear

    class FusedLoraLinear(Linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            names, base = self.active_adapters, self.base_layer
            plain = type(base) is nn.Linear and len(names) == 1 and not self.disable_adapters and not self.merged
            if args or kwargs or not plain or names[0] in self.lora_variant or names[0] not in self.lora_A:
                return super().forward(x, *args, **kwargs)
            name = names[0]
            a, b = self.lora_A[name].weight, self.lora_B[name].weight
            if not isinstance(self.lora_dropout[name], nn.Identity) or not x.dtype == base.weight.dtype == a.dtype:
                return super().forward(x)
            rows: Tensor = _Lora.apply(x, base.weight, base.bias, a, b, float(self.scaling[name]))  # type: ignore[no-untyped-call]
            # The view is made outside of _Lora, because a model may change the result in place, as OLMo does.
            return rows.view(*x.shape[:-1], -1)

    return FusedLoraLinear


class _Lora(torch.autograd.Function):
    """x [..., I], weight [O, I] and bias [O], frozen, a [r, I], b [O, r] -> rows [-1, O]"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        inner = rows @ a.t()
        # Not in place, because selective checkpointing keeps the result of the first product.
        result = torch.addmm(F.linear(rows, weight, bias), inner, b.t(), alpha=scaling)
        ctx.save_for_backward(rows, inner, weight, a, b)
        ctx.scaling, ctx.shape = scaling, x.shape
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, weight, a, b = ctx.saved_tensors
        gradient = gradient.reshape(-1, gradient.shape[-1])
        inner_gradient = (gradient @ b).mul_(ctx.scaling)
        x_gradient = (gradient @ weight).addmm_(inner_gradient, a).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return x_gradient, None, None, inner_gradient.t() @ rows, (gradient.t() @ inner).mul_(ctx.scaling), None
