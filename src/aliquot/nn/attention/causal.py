"""Causal attention of one document: by torch's own kernels where they know what the layer asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from aliquot.nn.attention.reference_attention import masked_attention

if TYPE_CHECKING:
    from aliquot.nn.attention.base import Scoring

Kernel = Callable[..., "Tensor"]  # called as F.scaled_dot_product_attention


def causal(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, kernel: Kernel = F.scaled_dot_product_attention
) -> Tensor:
    """query [1, H, T, D], key and value [1, H_kv, T_kv, .] -> [1, H, T, D_v]: the last T of T_kv are queried."""
    queries, keys, window = query.shape[2], key.shape[2], scoring.window
    grouped = query.shape[1] != key.shape[1]
    plain = scoring.softcap is None and scoring.sinks is None
    if plain and queries == keys and (window is None or keys <= window):
        return kernel(query, key, value, is_causal=True, scale=scoring.scaling, enable_gqa=grouped)
    # Row i stands at position keys - queries + i and sees itself and the window - 1 positions before it.
    position = torch.arange(keys - queries, keys, device=query.device)[:, None]
    other = torch.arange(keys, device=query.device)[None, :]
    allowed = other <= position
    if window is not None:
        allowed &= other > position - window
    if not plain:
        return masked_attention(query, key, value, allowed, scoring)
    return kernel(query, key, value, attn_mask=allowed, scale=scoring.scaling, enable_gqa=grouped)
