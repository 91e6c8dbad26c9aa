"""Activation checkpointing through transformers' own switch."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from aliquot.core.errors import UnsupportedModelError

# `selective` keeps results that are expensive to compute and recomputes cheap ones: norms, rotary, activations.
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
# Attention on GPUs and CPUs: these operations exist only after the import of their modules.
_KEPT_BY_NAME = frozenset({"torch_attn::_varlen_attn", "aliquot::tiled_attention"})


def enable(model: nn.Module, mode: Literal["none", "selective", "full"], dropout: bool = False) -> None:
    """Recompute each decoder layer in the backward pass: all of it (full), or all but products and attention."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout}
    if mode == "selective":
        if getattr(model.config, "clip_qkv", None) is not None:
            # OLMo clamps the results of products in place: kept results would be clamped, but gradients would pass.
            raise UnsupportedModelError(
                f"{type(model).__name__} changes what selective checkpointing keeps (clip_qkv): set"
                " train.gradient_checkpointing to none or full"
            )
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
    except ValueError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no activation checkpointing: set train.gradient_checkpointing to none"
        ) from error


def keeps(operation: object) -> bool:
    """Return whether `selective` keeps the result of an operation of torch."""
    return operation in _KEPT or getattr(operation, "_name", None) in _KEPT_BY_NAME


def _policy(_context: object, operation: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps(operation) else CheckpointPolicy.PREFER_RECOMPUTE
