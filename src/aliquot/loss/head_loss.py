"""The training loss: the output head and cross-entropy as one step, summed over the tokens that have a label.

The gradients of the head are computed in the forward pass, so logits live once, in place, in the compute dtype, and
only for tokens with a label. Where even that is too much they are computed twice, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    RowBuffer = Callable[[int, int], Tensor]  # room for the gradient of rows [a, b)
    Publish = Callable[[], None]

IGNORE = -100  # the label of a token after which nothing is to be predicted
LOGITS_BYTES = 256 << 20  # at most this much of them at once
SCRATCH_BYTES = 2 << 20  # fp32 rows that one pass over the logits works on: they stay in the cache


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [1, T, V] of any float dtype, labels int64 [T] already shifted -> fp32 scalar, a sum, not a mean."""
    return F.cross_entropy(logits[0].float(), labels, ignore_index=IGNORE, reduction="sum")


class GradientRows:
    """Where the gradient of the head goes, block of rows by block of rows, where it is not to exist as a whole."""

    def __init__(self, edges: tuple[int, ...], buffer: RowBuffer, publish: Publish) -> None:
        self.edges = edges  # 0 = e0 < e1 < ... = V
        self.buffer = buffer
        self.publish = publish  # called when the buffer is filled


def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, rows: GradientRows | None = None
) -> tuple[Tensor, Tensor]:
    """hidden [T, E], weight [V, E] of one dtype, labels int64 [T] already shifted.

    -> the summed cross-entropy, a detached fp32 scalar, and `scale` times it, to call backward() on, which must not be
    scaled further. Without autograd the second is the first. With `rows` the gradient of `weight` goes there during
    this call and autograd sees none.
    """
    labelled = labels != IGNORE
    if not bool(labelled.all()):
        hidden, labels = hidden[labelled], labels[labelled]
    if not torch.is_grad_enabled():
        total = sum(
            (
                summed_cross_entropy(F.linear(hidden[None, a:b], weight), labels[a:b])
                for a, b in _row_chunks(hidden, weight)
            ),
            torch.zeros((), device=hidden.device),
        )
        return total, total
    summed: Tensor
    scaled: Tensor
    scaled, summed = _HeadLoss.apply(hidden, weight if rows is None else weight.detach(), labels, scale, rows)  # type: ignore[no-untyped-call]
    return summed.detach(), scaled


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, rows: GradientRows | None
    ) -> tuple[Tensor, Tensor]:
        chunks = list(_row_chunks(hidden, weight))
        summed = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        normalizers = torch.empty(len(labels), device=hidden.device)  # log of the sum of exp(logits)
        logits = hidden.new_empty(0, weight.shape[0])
        for a, b in chunks:
            logits = F.linear(hidden[a:b], weight)
            summed += to_gradient_(logits, labels[a:b], scale, normalizers[a:b])
            torch.mm(logits, weight, out=hidden_gradient[a:b])
        whole = logits if len(chunks) == 1 else None

        def fill(a: int, b: int, out: Tensor) -> None:
            columns = whole[:, a:b] if whole is not None else _columns(hidden, weight, labels, scale, normalizers, a, b)
            torch.mm(columns.t(), hidden, out=out)

        weight_gradient = None
        if rows is None:
            weight_gradient = torch.empty_like(weight)
            for a, b in _column_chunks(hidden, weight, whole):
                fill(a, b, weight_gradient[a:b])
        else:
            for a, b in zip(rows.edges[:-1], rows.edges[1:], strict=True):
                fill(a, b, rows.buffer(a, b))
                rows.publish()
        ctx.gradients = (hidden_gradient, weight_gradient)
        ctx.mark_non_differentiable(summed)
        return summed * scale, summed

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor, _summed: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        ctx.gradients = (None, None)
        return *gradients, None, None, None


def to_gradient_(logits: Tensor, labels: Tensor, scale: float, normalizers: Tensor) -> Tensor:
    """Replace logits [N, V] by `scale` times the gradient of their summed cross-entropy; that sum, in fp32.

    `normalizers` [N] is set to the log of the sum of the exponentials.
    """
    summed = torch.zeros((), device=logits.device)
    count = max(1, SCRATCH_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else len(logits)
    for start in range(0, len(logits), max(1, count)):
        rows, wanted = logits[start : start + count], labels[start : start + count, None]
        values = rows.float()
        targets, largest = values.gather(1, wanted), values.amax(1, keepdim=True)
        probabilities = torch.softmax(values, 1)
        # The largest probability is 1 / the sum of exp(logit - largest), and never tiny.
        normalizer = largest - probabilities.amax(1, keepdim=True).log()
        normalizers[start : start + count] = normalizer[:, 0]
        summed += (normalizer - targets).sum()
        probabilities.mul_(scale).scatter_add_(1, wanted, torch.full_like(targets, -scale))
        rows.copy_(probabilities)
    return summed


def _columns(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, normalizers: Tensor, a: int, b: int
) -> Tensor:
    """Columns [a, b) of the gradient of the logits, [T, b - a], computed again where they could not be kept."""
    values = F.linear(hidden, weight[a:b]).float().sub_(normalizers[:, None]).exp_().mul_(scale)
    inside = ((labels >= a) & (labels < b)).nonzero().flatten()
    values[inside, labels[inside] - a] -= scale
    return values.to(hidden.dtype)


def rows_at_once(vocabulary: int, itemsize: int) -> int:
    """How many rows of logits live at once at most."""
    return max(16, LOGITS_BYTES // (vocabulary * itemsize))


def _row_chunks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, int]]:
    """At least one chunk, of no rows if there are none."""
    count = rows_at_once(weight.shape[0], weight.element_size())
    for start in range(0, max(1, len(hidden)), count):
        yield start, min(start + count, len(hidden))


def _column_chunks(hidden: Tensor, weight: Tensor, whole: Tensor | None) -> Iterator[tuple[int, int]]:
    count = weight.shape[0] if whole is not None else max(16, LOGITS_BYTES // (4 * max(1, len(hidden))))
    for start in range(0, weight.shape[0], count):
        yield start, min(start + count, weight.shape[0])
