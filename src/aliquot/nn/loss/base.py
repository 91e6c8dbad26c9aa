"""The interface of a head loss: output head and cross-entropy in one step, summed over tokens with a label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    RowBuffer = Callable[[int, int], Tensor]  # buffer for the gradient of rows [a, b)
    Publish = Callable[[], None]

IGNORE = -100  # the label of a token without a prediction


class GradientRows:
    """Receives the gradient of the head in blocks of rows, so that the gradient never exists as a whole."""

    def __init__(self, edges: tuple[int, ...], buffer: RowBuffer, publish: Publish) -> None:
        self.edges = edges  # 0 = e0 < e1 < ... = V
        self.buffer = buffer
        self.publish = publish  # called when the buffer is filled

    def blocks(self) -> Iterator[tuple[int, int]]:
        return pairwise(self.edges)


@dataclass(frozen=True)
class Chosen:
    """The tokens of a row that a loss works on, computed from labels in CPU memory to avoid waiting for a GPU."""

    rows: Tensor | None  # int64, indices of tokens, those with a label first; None: all tokens
    learned: int  # number of tokens with a label


class HeadLoss(Protocol):
    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: float,
        rows: GradientRows | None = None,
        chosen: Chosen | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, E], weight [V, E] of one dtype, labels int64 [T] already shifted.

        Returns (summed cross-entropy as a detached fp32 scalar, `scale` times the sum). Call backward() on the second
        value, without further scaling. Without autograd both are the same. With `rows` the gradient of `weight` goes
        there during this call, and autograd gets none. `chosen`: the choice of tokens by `labels`, if it is known.
        """
        ...


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [1, T, V] of any float dtype, labels int64 [T] already shifted -> fp32 scalar, a sum, not a mean."""
    return F.cross_entropy(logits[0].float(), labels, ignore_index=IGNORE, reduction="sum")
