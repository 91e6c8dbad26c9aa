"""The interface of attention backends, and the row of packed documents that carries a backend through a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How a layer turns products of queries and keys into attention scores."""

    scaling: float
    window: int | None = None  # tokens that a token attends to, with itself
    softcap: float | None = None  # scores become softcap x tanh(scores / softcap): Gemma 2
    sinks: Tensor | None = (
        None  # [H]: a score of each head without a value, which takes a share of the softmax (gpt-oss)
    )


class AttentionBackend(Protocol):
    """Causal attention within each document.

    A backend stores what it computes from a row in the row itself, so that results do not depend on earlier rows.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        """query [1, H, T, D], key [1, H_kv, T, D], value [1, H_kv, T, D_v] -> [1, T, H, D_v].

        A token attends to itself and to earlier tokens of its document.
        """
        ...

    def on_meta(self) -> AttentionBackend:
        """Return a backend for meta tensors, from which the planner learns memory and products of `attend`."""
        ...


class Documents:
    """The edges of documents in a row, 0 = e0 < e1 < ... = T, and the backend that attends within them.

    Without a backend the model cannot attend to several documents in a row: each document is a call of the model.
    """

    def __init__(self, edges: tuple[int, ...], backend: AttentionBackend | None) -> None:
        self.edges = edges
        self.backend = backend
        # The backend's cut of the row, by (window, dtype): the first layer computes it for all layers.
        self.cuts: dict[tuple[int | None, torch.dtype], Any] = {}
        # Router logits of each call of a mixture of experts with an auxiliary loss: [tokens, experts] of each layer.
        self.router_logits: list[tuple[Tensor, ...]] = []
