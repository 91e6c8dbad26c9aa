"""What an attention backend is, and the row of packed documents that carries one through a model's forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class AttentionBackend(Protocol):
    """Causal attention within each document. Without state: what it works out of a row is kept with the row."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scaling: float, window: int | None
    ) -> Tensor:
        """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D].

        A token sees itself and those before it in its document; with `window`, so many tokens, itself included.
        """
        ...

    def on_meta(self) -> Self:
        """What the planner runs on meta tensors to learn what `attend` keeps, multiplies and needs as scratch."""
        ...


class Documents:
    """Where the documents of a row lie: 0 = e0 < e1 < ... = T. `visits` counts the attention layers that saw it."""

    def __init__(self, edges: tuple[int, ...], backend: AttentionBackend) -> None:
        self.edges = edges
        self.backend = backend
        self.visits = 0
        # How the backend cuts the row for a window: by the first of the layers that share it.
        self.cuts: dict[tuple[int | None, torch.dtype], Any] = {}
