"""Attention as it is defined: the scores of all pairs of the row, a mask, softmax. Slow; what the others must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aliquot.nn.attention.base import Documents, Scoring


class ReferenceAttention:
    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        position = torch.arange(query.shape[2], device=query.device)
        document = torch.bucketize(position, position.new_tensor(documents.edges[1:]), right=True)
        back = position[:, None] - position  # how far each key lies behind each query
        seen = (document[:, None] == document) & (back >= 0)
        if scoring.window is not None:
            seen &= back < scoring.window
        return masked_attention(query, key, value, seen, scoring).transpose(1, 2).contiguous()

    def on_meta(self) -> ReferenceAttention:
        return self


def masked_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    """query [1, H, T, D], key [1, H_kv, T_kv, D], value [1, H_kv, T_kv, D_v], seen bool [T, T_kv] -> [1, H, T, D_v]."""
    group = query.shape[1] // key.shape[1]  # queries that share a key
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if scoring.sinks is not None:
        sink = scoring.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value
