"""Causal attention of one document by torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Callable[..., "Tensor"]  # called as F.scaled_dot_product_attention


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    kernel: Kernel = F.scaled_dot_product_attention,
) -> Tensor:
    """query [1, H, T, D], key and value [1, H_kv, T_kv, D] -> [1, H, T, D]: the last T of T_kv are queried."""
    queries, keys = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if queries == keys and (window is None or keys <= window):
        return kernel(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    # Row i stands at position keys - queries + i and sees itself and the window - 1 positions before it.
    position = torch.arange(keys - queries, keys, device=query.device)[:, None]
    other = torch.arange(keys, device=query.device)[None, :]
    allowed = other <= position
    if window is not None:
        allowed &= other > position - window
    return kernel(query, key, value, attn_mask=allowed, scale=scaling, enable_gqa=grouped)
