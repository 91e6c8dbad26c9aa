"""Attention as it is defined: the scores of all pairs of the row, a mask, softmax. Slow; what the others must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aliquot.attention.base import Documents


class ReferenceAttention:
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scaling: float, window: int | None
    ) -> Tensor:
        group = query.shape[1] // key.shape[1]  # queries that share a key
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        position = torch.arange(query.shape[2], device=query.device)
        document = torch.bucketize(position, position.new_tensor(documents.edges[1:]), right=True)
        back = position[:, None] - position  # how far each key lies behind each query
        seen = (document[:, None] == document) & (back >= 0)
        if window is not None:
            seen &= back < window
        scores = (query @ key.mT * scaling).masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ value).transpose(1, 2)

    def on_meta(self) -> ReferenceAttention:
        return self
