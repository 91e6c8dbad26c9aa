"""Attention per document: packed sequences attend within their own documents only, without an S x S mask.

Registered through transformers' AttentionInterface; the row and its backend travel as a keyword argument of the model's
forward, so that activation checkpointing replays them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from aliquot.attention.causal import causal
from aliquot.attention.cuda_attention import CudaAttention
from aliquot.attention.tiled_attention import TiledAttention
from aliquot.errors import UnsupportedModelError

if TYPE_CHECKING:
    from aliquot.attention.base import AttentionBackend, Documents

IMPLEMENTATION = "aliquot_documents"


def attention_on(device: str) -> AttentionBackend:
    return CudaAttention() if device == "cuda" else TiledAttention()


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
        return causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    documents.visits += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return documents.backend.attend(query, key, value, documents, scale, sliding_window), None
