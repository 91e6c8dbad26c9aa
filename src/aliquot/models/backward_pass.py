"""Change the backward pass of a model: activation checkpointing, and faster weight gradients of linear layers.

A matrix product whose left side is a transposed view is slow on CPUs with AMX. Therefore, in models that are not
compiled, CopyingLinear computes the gradient of its weight from a contiguous transposed copy. It either copies the
gradient of the output, or the input and the resulting weight gradient, whichever is smaller. For compiled models
engines/model_kernels.py does the same with kernels that copy twice as fast as torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from aliquot.core.errors import UnsupportedModelError
from aliquot.machine.matmul import copy_pays

_MANY_TOKENS = 1 << 20
# `selective` checkpointing saves the results of these operations, which are expensive to compute: matrix products and
# attention. It recomputes cheap operations: norms, rotary embeddings, activation functions.
_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)
# Attention on GPUs and on CPUs, by name, because the operations exist only after the import of their modules.
_KEPT_BY_NAME = frozenset({"torch_attn::_varlen_attn", "aliquot::tiled_attention"})


def enable_checkpointing(model: nn.Module, mode: Literal["none", "selective", "full"], dropout: bool = False) -> None:
    """Enable activation checkpointing of each decoder layer.

    Args:
        mode: `full` recomputes the whole layer in the backward pass. `selective` saves the results of matrix products
            and attention, and recomputes all others.
        dropout: whether the model has dropout, so that the recomputation must restore the state of the random numbers.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout}
    if mode == "selective":
        if getattr(model.config, "clip_qkv", None) is not None:
            # OLMo clamps the results of matrix products in place. The saved results would already be clamped, so that
            # the recomputed clamp would pass gradients that it must block.
            raise UnsupportedModelError(
                f"{type(model).__name__} changes what selective checkpointing keeps (clip_qkv): set"
                " train.gradient_checkpointing to none or full"
            )
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    try:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)  # type: ignore[operator]
    except ValueError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no activation checkpointing: set train.gradient_checkpointing to none"
        ) from error


def is_kept(operation: object) -> bool:
    """Return whether `selective` activation checkpointing saves the result of a torch operation."""
    return operation in _KEPT or getattr(operation, "_name", None) in _KEPT_BY_NAME


def _policy(_context: object, operation: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operation) else CheckpointPolicy.PREFER_RECOMPUTE


class CopyingLinear(nn.Linear):
    """A linear layer that computes the gradient of its weight from a transposed copy, which is faster on some CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def copy_in_backward(model: nn.Module, copies: bool = True) -> None:
    """Turn trained nn.Linear layers into CopyingLinear where that is faster; with `copies` false, turn them back.

    Other subclasses of nn.Linear are not changed.
    """
    for module in model.modules():
        # Changing the class, as FSDP2 does, keeps parameters, hooks and names.
        if (
            copies
            and type(module) is nn.Linear
            and module.weight.requires_grad
            and copy_pays(module.out_features, _MANY_TOKENS, module.in_features)
        ):
            module.__class__ = CopyingLinear
        elif not copies and type(module) is CopyingLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


class _Linear(torch.autograd.Function):
    """Apply a linear layer: x [..., I], weight [O, I], bias [O] -> [..., O]."""

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
    """Return the gradient of a linear layer's weight: gradient [T, O], x [T, I] -> [O, I]."""
    (tokens, outputs), inputs = gradient.shape, x.shape[1]
    if not copy_pays(outputs, tokens, inputs):
        return torch.mm(gradient.t(), x)
    if tokens * outputs <= (tokens + outputs) * inputs:
        return torch.mm(gradient.t().contiguous(), x)
    return torch.mm(x.t().contiguous(), gradient).t().contiguous()
