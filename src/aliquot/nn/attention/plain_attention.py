"""Attention by its definition, and attention of one document by torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from aliquot.nn.attention.base import Documents, Scoring


class ReferenceAttention:
    """Attention by its definition: scores of all pairs, a mask, softmax. Slow; other backends must give the same."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        position = torch.arange(query.shape[2], device=query.device)
        document = torch.bucketize(position, position.new_tensor(documents.edges[1:]), right=True)
        distance = position[:, None] - position  # tokens from each key to each query
        visible = (document[:, None] == document) & (distance >= 0)
        if scoring.window is not None:
            visible &= distance < scoring.window
        return masked_attention(query, key, value, visible, scoring).transpose(1, 2).contiguous()

    def on_meta(self) -> ReferenceAttention:
        return self


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """Attend by a mask: query [1, H, T, D], key [1, H_kv, T_kv, D], value [1, H_kv, T_kv, D_v] -> [1, H, T, D_v].

    `visible`: bool [T, T_kv].
    """
    group = query.shape[1] // key.shape[1]  # number of queries that share a key
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if scoring.sinks is not None:
        sink = scoring.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


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
    # Query i is at position keys - queries + i and attends to itself and the window - 1 positions before.
    position = torch.arange(keys - queries, keys, device=query.device)[:, None]
    key_position = torch.arange(keys, device=query.device)[None, :]
    allowed = key_position <= position
    if window is not None:
        allowed &= key_position > position - window
    if not plain:
        return masked_attention(query, key, value, allowed, scoring)
    return kernel(query, key, value, attn_mask=allowed, scale=scoring.scaling, enable_gqa=grouped)
