"""A plain LoRA layer of peft with its sums fused into the matrix products.

peft scales and adds in separate passes over results of the layer's size, which take a fifth of a step on a CPU. peft
accepts custom layers by `_register_custom_module`, which it calls experimental. Without that function, and for dropout,
merged weights and all other variants, the forward pass of peft runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn


def fuse(settings: LoraConfig) -> None:
    """Make peft create FusedLoraLinear for linear layers."""
    register = getattr(settings, "_register_custom_module", None)
    if register is not None:
        register({nn.Linear: FusedLoraLinear})


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
        return rows.view(
            *x.shape[:-1], -1
        )  # outside of _Lora, because a model may change the result in place, as OLMo does


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
