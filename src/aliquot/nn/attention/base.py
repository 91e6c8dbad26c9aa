"""What an attention backend is, and the row of packed documents that carries one through a model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """What a layer does to the products of queries and keys before and in the softmax."""

    scaling: float
    window: int | None = None  # tokens that a token sees, itself included
    softcap: float | None = None  # scores become softcap x tanh(scores / softcap): Gemma 2
    sinks: Tensor | None = None  # [H]: a score a head that takes its share of the softmax and has no value: gpt-oss


class AttentionBackend(Protocol):
    """Causal attention within each document. What it works out of a row is kept with the row: results depend on
    nothing that came before."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        """query [1, H, T, D], key [1, H_kv, T, D], value [1, H_kv, T, D_v] -> [1, T, H, D_v].

        A token sees itself and those before it in its document.
        """
        ...

    def on_meta(self) -> AttentionBackend:
        """What the planner runs on meta tensors to learn what `attend` keeps, multiplies and needs as scratch."""
        ...


class Documents:
    """Where the documents of a row lie: 0 = e0 < e1 < ... = T, and what attends within them.

    Without a backend the model cannot have several documents in a row: it is called once for each, as it is.
    """

    def __init__(self, edges: tuple[int, ...], backend: AttentionBackend | None) -> None:
        self.edges = edges
        self.backend = backend
        # How the backend cuts the row for a window: by the first of the layers that share it.
        self.cuts: dict[tuple[int | None, torch.dtype], Any] = {}
        # Of each call of a mixture of experts that is to balance them: [tokens, experts] of each layer.
        self.router_logits: list[tuple[Tensor, ...]] = []
