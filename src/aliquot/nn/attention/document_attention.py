"""Attention per document: packed sequences attend within their documents only, without an S x S mask.

transformers calls it by its AttentionInterface. The row with its backend is a keyword argument of the model's forward,
so that activation checkpointing replays it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aliquot.core.errors import UnsupportedModelError
from aliquot.nn.attention.base import Scoring
from aliquot.nn.attention.plain_attention import causal
from aliquot.nn.attention.tiled_attention import TiledAttention

if TYPE_CHECKING:
    from aliquot.nn.attention.base import AttentionBackend, Documents

IMPLEMENTATION = "aliquot_documents"
# Keyword arguments of models that have no effect on attention: queries and keys contain positions already.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids", "position_embeddings", "use_cache", "cache_position", "past_key_values", "past_key_value",
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "layer_idx",
    }
)  # fmt: skip


def attention_on(device: str, packs: bool = True, selective: bool = False) -> AttentionBackend | None:
    """Return the backend of a device; None if each document is a call with the model's own attention.

    `selective`: selective activation checkpointing is on.
    """
    if not packs:
        return None
    if device == "cuda":
        from aliquot.nn.attention.cuda_attention import CudaAttention  # imports torch's compiler

        return CudaAttention()
    return TiledAttention(selective)


def register(compiled: bool = False) -> None:
    """Register `attn_implementation=IMPLEMENTATION` with transformers, which builds no mask for it.

    `compiled`: exclude it from torch.compile, because its products depend on the edges of documents.
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
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key [1, H_kv, T_kv, D], value [1, H_kv, T_kv, D_v] -> ([1, T, H, D_v], None).

    Args:
        options: `sliding_window`, `softcap`, `s_aux` (sinks) and `documents`. Without `documents` (generation) the row
            is one document, and its last T of T_kv positions are queries.

    Raises:
        UnsupportedModelError: the model asks for an option that aliquot's attention lacks.
    """
    window, softcap, sinks = (options.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    documents: Documents | None = options.pop("documents", None)
    unknown = sorted(key for key, value in options.items() if value is not None and key not in _WITHOUT_EFFECT)
    if unknown or dropout or attention_mask is not None:
        what = [*unknown, *(["dropout"] if dropout else []), *(["a mask"] if attention_mask is not None else [])]
        raise UnsupportedModelError(f"{type(module).__name__} asks attention for {', '.join(what)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, window, softcap, sinks)
    if documents is None or documents.backend is None:
        return causal(query, key, value, scoring).transpose(1, 2).contiguous(), None
    return documents.backend.attend(query, key, value, documents, scoring), None
