"""What a head loss is: the output head and cross-entropy as one step, summed over the tokens that have a label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    RowBuffer = Callable[[int, int], Tensor]  # room for the gradient of rows [a, b)
    Publish = Callable[[], None]

IGNORE = -100  # the label of a token after which nothing is to be predicted


class GradientRows:
    """Where the gradient of the head goes, block of rows by block of rows, where it is not to exist as a whole."""

    def __init__(self, edges: tuple[int, ...], buffer: RowBuffer, publish: Publish) -> None:
        self.edges = edges  # 0 = e0 < e1 < ... = V
        self.buffer = buffer
        self.publish = publish  # called when the buffer is filled

    def blocks(self) -> Iterator[tuple[int, int]]:
        return pairwise(self.edges)


@dataclass(frozen=True)
class Chosen:
    """The tokens of a row that a loss works on. Found where labels lie in CPU memory: a GPU that is asked for numbers
    must be waited for."""

    rows: Tensor | None  # int64, which tokens, those that have a label first; None: all
    learned: int  # how many have a label


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

        -> the summed cross-entropy, a detached fp32 scalar, and `scale` times it, to call backward() on, which must not
        be scaled further. Without autograd the second is the first. With `rows` the gradient of `weight` goes there
        during this call and autograd sees none. `chosen`: of `labels`, where it is known.
        """
        ...


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [1, T, V] of any float dtype, labels int64 [T] already shifted -> fp32 scalar, a sum, not a mean."""
    return F.cross_entropy(logits[0].float(), labels, ignore_index=IGNORE, reduction="sum")
