"""The head loss that engines train with: logits never exist as a whole in fp32, nor all at once where they are many.

The gradients of the head are computed in the forward pass, so logits live once, in place, in the compute dtype, and
only for tokens with a label and a few others. Where even that is too much they are computed twice, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aliquot.loss.base import IGNORE, GradientRows, HeadLoss, summed_cross_entropy

if TYPE_CHECKING:
    Blocks = Callable[[range], Iterable[int]]

ROW_COUNTS = 8  # different ones, of rows that have as many tokens


def head_loss_on(device: str, blocks: Blocks = iter) -> HeadLoss:
    """On CPU the rows that are worked on in fp32 stay in the cache; a GPU takes all at once (not yet run on one)."""
    return FusedLoss(scratch_bytes=2 << 20 if device == "cpu" else None, blocks=blocks)


@dataclass(frozen=True)
class FusedLoss:
    scratch_bytes: int | None  # fp32 rows that one pass over the logits works on; None: all
    logits_bytes: int = 256 << 20  # at most this much of them at once
    blocks: Blocks = iter  # the passes over the logits: the planner makes two and counts them as all

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, rows: GradientRows | None = None
    ) -> tuple[Tensor, Tensor]:
        labelled = labels != IGNORE
        if not bool(labelled.all()):
            taken = _labelled_first(labelled)
            hidden, labels = hidden[taken], labels[taken]
        if not torch.is_grad_enabled():
            total = torch.zeros((), device=hidden.device)
            for a, b in self.row_chunks(hidden, weight):
                logits = F.linear(hidden[None, a:b], weight)
                total = total + summed_cross_entropy(logits, labels[a:b].to(logits.device))  # the planner's are on CPU
            return total, total
        summed: Tensor
        scaled: Tensor
        scaled, summed = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, weight if rows is None else weight.detach(), labels, scale, rows, self
        )
        return summed.detach(), scaled

    def row_chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, int]]:
        """At least one chunk, of no rows if there are none."""
        count = max(16, self.logits_bytes // (weight.shape[0] * weight.element_size()))
        for start in range(0, max(1, len(hidden)), count):
            yield start, min(start + count, len(hidden))

    def column_chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, int]]:
        """Chunks of the logits' columns in fp32, all rows of them."""
        count = max(16, self.logits_bytes // (4 * max(1, len(hidden))))
        for start in range(0, weight.shape[0], count):
            yield start, min(start + count, weight.shape[0])

    def to_gradient_(self, logits: Tensor, labels: Tensor, scale: float, normalizers: Tensor) -> Tensor:
        """Replace logits [N, V] by `scale` times the gradient of their summed cross-entropy; that sum, in fp32.

        `normalizers` [N] is set to the log of the sum of the exponentials.
        """
        summed = torch.zeros((), device=logits.device)
        count = len(logits) if self.scratch_bytes is None else self.scratch_bytes // (4 * logits.shape[1])
        count = max(1, count)
        for start in self.blocks(range(0, len(logits), count)):
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


def _labelled_first(labelled: Tensor) -> Tensor:
    """The tokens that have a label, then some that have none: so many that together they are a multiple of an eighth of
    all. Every number of rows would be another shape of product, of which oneDNN keeps a kernel."""
    own, others = labelled.nonzero().flatten(), (~labelled).nonzero().flatten()
    step = -(-len(labelled) // ROW_COUNTS)
    return torch.cat([own, others[: -len(own) % step]])


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: float,
        rows: GradientRows | None,
        fused: FusedLoss,
    ) -> tuple[Tensor, Tensor]:
        chunks = list(fused.row_chunks(hidden, weight))
        summed = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        learned = int((labels != IGNORE).sum())  # those come first
        # The log of the sum of exp(logits); infinite where nothing is learned: all probabilities are 0 there.
        normalizers = torch.full((len(labels),), float("inf"), device=hidden.device)
        logits = hidden.new_empty(0, weight.shape[0])
        for a, b in chunks:
            logits = F.linear(hidden[a:b], weight)
            end = min(max(a, learned), b)
            summed += fused.to_gradient_(logits[: end - a], labels[a:end], scale, normalizers[a:end])
            logits[end - a :].zero_()
            if hidden_gradient is not None:
                torch.mm(logits, weight, out=hidden_gradient[a:b])
        whole = logits if len(chunks) == 1 else None

        def fill(a: int, b: int, out: Tensor) -> None:
            columns = whole[:, a:b] if whole is not None else _columns(hidden, weight, labels, scale, normalizers, a, b)
            torch.mm(columns.t(), hidden, out=out)

        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.empty_like(weight)
            for a, b in fused.column_chunks(hidden, weight) if whole is None else [(0, len(weight))]:
                fill(a, b, weight_gradient[a:b])
        elif rows is not None:
            for a, b in rows.blocks():
                fill(a, b, rows.buffer(a, b))
                rows.publish()
        ctx.gradients = (hidden_gradient, weight_gradient)
        ctx.mark_non_differentiable(summed)
        return summed * scale, summed

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor, _summed: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        ctx.gradients = (None, None)
        return *gradients, None, None, None, None


def _columns(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, normalizers: Tensor, a: int, b: int
) -> Tensor:
    """Columns [a, b) of the gradient of the logits, [T, b - a], computed again where they could not be kept."""
    values = F.linear(hidden, weight[a:b]).float().sub_(normalizers[:, None]).exp_().mul_(scale)
    inside = ((labels >= a) & (labels < b)).nonzero().flatten()
    values[inside, labels[inside] - a] -= scale
    return values.to(hidden.dtype)
