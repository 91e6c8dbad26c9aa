"""Attention per document: tokens of a packed sequence attend only within their document, without an S x S mask.

transformers calls `document_attention` through its AttentionInterface. The model's forward method gets the `Documents`
of a row as a keyword argument, so that activation checkpointing passes the same object again. `ReferenceAttention`
defines what every backend computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aliquot.core.errors import UnsupportedModelError
from aliquot.machine.device_copies import send
from aliquot.machine.torch_compile import outside_of_graphs
from aliquot.nn.attention.tiled_attention import TiledAttention

IMPLEMENTATION = "aliquot_documents"
# What torch.compile must not take as a constant: it would compile again for other documents.
DYNAMIC_SOURCES = r".*\bdocuments\b.*\.offsets,.*\bdocuments\b.*\.longest"
# Keyword arguments of models that have no effect on attention, because queries and keys already contain positions.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids", "position_embeddings", "use_cache", "cache_position", "past_key_values", "past_key_value",
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "layer_idx",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Scoring:
    """How a layer turns products of queries and keys into attention scores."""

    scaling: float
    window: int | None = None  # tokens that a token attends to, including itself
    softcap: float | None = None  # scores become softcap x tanh(scores / softcap): Gemma 2
    sinks: Tensor | None = None  # [H]: a score per head without a value, which takes a share of the softmax (gpt-oss)


class AttentionBackend(Protocol):
    """An implementation of causal attention within each document.

    A backend caches data about a row in the row's `Documents`, so that results do not depend on earlier rows.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        """Attend: query [1, H, T, D], key [1, H_kv, T, D], value [1, H_kv, T, D_v] -> [1, T, H, D_v].

        A token attends to itself and to earlier tokens of its document.
        """
        ...


class Documents:
    """The document boundaries of a row, 0 = e0 < e1 < ... = T, and the attention backend for these documents.

    Without a backend, the model cannot attend to several documents in a row and is called once per document.
    """

    def __init__(self, edges: tuple[int, ...], backend: AttentionBackend | None) -> None:
        self.edges = edges
        self.backend = backend
        # The backend's tiles or masks of the row, by (window, dtype). The first layer computes them for all layers.
        self.cuts: dict[tuple[int | None, torch.dtype], Any] = {}
        # Set by `on`, for kernels that take a whole row: the edges as int32 on the device of the row, and a bound for
        # the tokens of a document.
        self.offsets = torch.empty(0, dtype=torch.int32)
        self.longest = 0
        # Router logits of each call of a mixture of experts with an auxiliary loss: [tokens, experts] of each layer.
        self.router_logits: list[tuple[Tensor, ...]] = []

    def on(self, device: torch.device) -> Self:
        """Set `offsets` and `longest` before the forward pass, because compiled layers cannot derive them from `edges`.

        Both are rounded up to powers of two, `offsets` by empty documents at the end of the row: kernels that are built
        for these numbers are then built for few of them.
        """
        empty = _power_of_two(len(self.edges)) - len(self.edges)
        self.offsets = send(torch.tensor(self.edges + self.edges[-1:] * empty, dtype=torch.int32), device)
        self.longest = _power_of_two(max(stop - start for start, stop in pairwise(self.edges)))
        return self


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class ReferenceAttention:
    """Attention by its definition: scores of all pairs, a mask, softmax. Slow; all backends must give this result."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        position = torch.arange(query.shape[2], device=query.device)
        document = torch.bucketize(position, position.new_tensor(documents.edges[1:]), right=True)
        distance = position[:, None] - position  # tokens from each key to each query
        visible = (document[:, None] == document) & (distance >= 0)
        if scoring.window is not None:
            visible &= distance < scoring.window
        return masked_attention(query, key, value, visible, scoring).transpose(1, 2).contiguous()


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """Attend by a mask: query [1, H, T, D], key [1, H_kv, T_kv, D], value [1, H_kv, T_kv, D_v] -> [1, H, T, D_v].

    `visible`: bool [T, T_kv].
    """
    group = query.shape[1] // key.shape[1]  # number of query heads that share a key head
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if scoring.sinks is not None:
        sink = scoring.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    kernel: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    """Compute causal attention in one document. The last T of T_kv positions are queries.

    query [1, H, T, D], key and value [1, H_kv, T_kv, .] -> [1, H, T, D_v].
    """
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


def attention_on(device: str, packs: bool = True, selective: bool = False) -> AttentionBackend | None:
    """Return the backend of a device; None if the model runs once per document, with its own attention.

    `selective`: selective activation checkpointing is on.
    """
    if not packs:
        return None
    if device == "cuda":
        from aliquot.nn.attention.cuda_attention import CudaAttention  # imports torch's compiler

        return CudaAttention()
    return TiledAttention(selective)


def register(splits_graphs: bool = False) -> None:
    """Register `document_attention` with transformers as `attn_implementation=IMPLEMENTATION`, without a mask.

    `splits_graphs`: exclude the function from torch.compile, because the backend's products depend on the documents.
    """
    from transformers import AttentionInterface

    function = outside_of_graphs(document_attention) if splits_graphs else document_attention
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
    """Compute attention for transformers, as an implementation of its AttentionInterface.

    query [1, H, T, D], key [1, H_kv, T_kv, D], value [1, H_kv, T_kv, D_v] -> ([1, T, H, D_v], None).
    Options are `sliding_window`, `softcap`, `s_aux` (sinks) and `documents`; any other raises UnsupportedModelError.
    Without `documents` (generation), the row is one document, and its last T of T_kv positions are queries.
    """
    window, softcap, sinks = (options.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    documents: Documents | None = options.pop("documents", None)
    unknown = sorted(key for key, value in options.items() if value is not None and key not in _WITHOUT_EFFECT)
    if unknown or dropout or attention_mask is not None:
        what = [*unknown, *(["dropout"] if dropout else []), *(["a mask"] if attention_mask is not None else [])]
        raise UnsupportedModelError(f"{type(module).__name__} asks attention for {', '.join(what)}")
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, sinks)
    if documents is None or documents.backend is None:
        return causal(query, key, value, scoring).transpose(1, 2).contiguous(), None
    return documents.backend.attend(query, key, value, documents, scoring), None
