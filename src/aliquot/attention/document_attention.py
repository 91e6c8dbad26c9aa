"""Attention per document: packed sequences attend within their own documents only, without an S x S mask.

Registered through transformers' AttentionInterface; the edges travel as a keyword argument of the model's forward,
so that activation checkpointing replays them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aliquot.attention import tiles
from aliquot.attention.tiled_attention import TiledAttention
from aliquot.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

IMPLEMENTATION = "aliquot_documents"


class Documents:
    """Where the documents of a row lie: 0 = e0 < e1 < ... = T. `visits` counts the attention layers that saw it."""

    def __init__(self, edges: tuple[int, ...]) -> None:
        self.edges = edges
        self.visits = 0
        self._tiles: dict[tuple[int | None, torch.dtype], tiles.Tiles] = {}

    def tiles(self, window: int | None, dtype: torch.dtype) -> tiles.Tiles:
        """How the row is cut on CPU: worked out by the first of its layers, the same for all that share a window."""
        if (window, dtype) not in self._tiles:
            self._tiles[window, dtype] = tiles.cut(self.edges, window, dtype)
        return self._tiles[window, dtype]


def register(compiled: bool = False) -> None:
    """Make `attn_implementation=IMPLEMENTATION` known to transformers; it then builds no mask for it.

    `compiled`: torch.compile leaves it as it is: its products depend on where the documents lie.
    """
    from transformers import AttentionInterface

    function = torch.compiler.disable(document_attention) if compiled else document_attention  # type: ignore[no-untyped-call]
    AttentionInterface.register(IMPLEMENTATION, function)


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    documents: Documents | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T_kv, D] -> ([1, T, H, D], None).

    Without `documents` (generation) the row is one document whose last T of T_kv positions are queried.
    """
    if softcap is not None or s_aux is not None or dropout:
        raise UnsupportedModelError(
            f"{type(module).__name__}: attention with soft-cap, sinks or dropout is not supported"
        )
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__}: this model builds an attention mask of its own: not supported"
        )
    if documents is None:
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    documents.visits += 1
    if query.device.type == "cpu":
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        out: Tensor = TiledAttention.apply(*rows, documents.tiles(sliding_window, query.dtype), scale)  # type: ignore[no-untyped-call]
        return out[None], None
    outputs = [
        _causal(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scaling, sliding_window)
        for a, b in pairwise(documents.edges)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if queries == keys and (window is None or keys <= window):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    # Row i stands at position keys - queries + i and sees itself and the window - 1 positions before it.
    position = torch.arange(keys - queries, keys, device=query.device)[:, None]
    other = torch.arange(keys, device=query.device)[None, :]
    allowed = other <= position
    if window is not None:
        allowed &= other > position - window
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scaling, enable_gqa=grouped)
