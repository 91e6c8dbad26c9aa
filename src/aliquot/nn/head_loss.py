"""Fused output head and cross-entropy, summed over tokens with a label, without a full matrix of logits in fp32.

The forward pass already computes the gradients, and overwrites the logits with their gradient. Logits are in memory
once, in the compute dtype, and only for tokens with a label and a few filler tokens. If these logits are too large,
they are computed twice, in chunks.

For a loss of log-probabilities (nn/row_loss.py) the head runs twice: first for the log-probabilities, then for
gradients, in which each token has a weight that depends on all log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from aliquot.machine.device_copies import send
from aliquot.machine.matmul import copy_pays
from aliquot.nn.logits_gradient import (
    IGNORE,
    gradient_factors,
    has_entropies,
    to_gradient_,
    to_gradient_compiled_,
    token_cross_entropy,
    token_entropies,
)
from aliquot.nn.product_shapes import HOST_LOGITS_BYTES, LOGITS_ROW_COUNTS, logits_room
from aliquot.nn.row_loss import RowLoss

Blocks = Callable[[range], Iterable[int]]

_LOGITS_COLUMNS = 4096
_ALIGNED_ROWS = 16  # rows that begin at a multiple of 16 bytes for any number of columns
_COLUMNS = 512  # of a product that stays in the CPU cache until it is transposed


@dataclass
class GradientRows:
    """Receives the gradient of the head in blocks of rows, so that the gradient never exists as a whole."""

    edges: tuple[int, ...]  # 0 = e0 < e1 < ... = V
    buffer: Callable[[int, int], Tensor]  # memory for the gradient of rows [a, b)
    publish: Callable[[], None]  # called when the buffer is filled

    def blocks(self) -> Iterator[tuple[int, int]]:
        return pairwise(self.edges)


@dataclass(frozen=True)
class Chosen:
    """The tokens of a row that enter the loss, chosen from a CPU copy of the labels to avoid waiting for a GPU."""

    rows: Tensor | None  # int64, indices of tokens, those with a label first; None: all tokens
    learned: int  # number of tokens with a label
    row_loss: RowLoss | None = None  # replaces the cross-entropy; of the tokens with a label, in the order of `rows`
    labels: Tensor | None = None  # of `rows`, which may name a token several times; None: the labels of the tokens

    def to(self, device: torch.device) -> Self:
        """Copy the tensors to `device` asynchronously."""
        rows, labels = (None if tensor is None else send(tensor, device) for tensor in (self.rows, self.labels))
        return replace(self, rows=rows, labels=labels, row_loss=self.row_loss and self.row_loss.to(device))


def head_loss_on(
    device: str,
    blocks: Blocks = iter,
    logits_bytes: int | None = None,
    copies_transposed: bool = False,
    compiled: bool = False,
) -> FusedLoss:
    """Return the fused loss for a device. A pass over fp32 rows fits into a CPU core's cache, or keeps a GPU busy.

    `logits_bytes`: the most bytes of logits at once; None: chosen for this machine. `copies_transposed`: see
    machine/matmul.py.
    """
    if logits_bytes is None:
        memory = None if device == "cpu" else torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        logits_bytes = logits_room(memory)
    scratch_bytes = 512 << 10 if device == "cpu" else 256 << 20
    return FusedLoss(scratch_bytes, logits_bytes, blocks, copies_transposed, compiled and device == "cuda")


@dataclass(frozen=True)
class FusedLoss:
    scratch_bytes: int  # bytes of fp32 rows in one pass over the logits
    logits_bytes: int = HOST_LOGITS_BYTES  # the most bytes of logits at once
    blocks: Blocks = iter  # the loop over passes over the logits
    copies_transposed: bool = False  # multiply transposed copies if that is faster with AMX
    compiled: bool = False  # whether passes are compiled

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: float,
        rows: GradientRows | None = None,
        chosen: Chosen | None = None,
        room: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy, a detached fp32 scalar, and `scale` times the sum, for backward().

        Shapes: hidden [T, E], weight [V, E], labels int64 [T], already shifted. Call backward() on the second value
        without further scaling. Without autograd, both values are the unscaled sum. With `rows`, this call sends the
        gradient of `weight` to `rows`, and autograd gets none. `chosen`: the result of `choose(labels)`, if known.
        `room`: a buffer from `self.room` for the logits, which this call overwrites. With `chosen.row_loss`, the first
        result holds the log-probabilities of the learned tokens, fp32 [L], and the second has the gradient of `scale`
        times the summed loss, but not its value.
        """
        hidden = hidden.to(weight.dtype)  # as transformers does: Mamba returns fp32 for weights of any dtype
        chosen = chosen or choose(labels)
        if chosen.rows is not None:
            # The backward pass of `hidden[rows]` would sort the rows.
            hidden = hidden.index_select(0, chosen.rows.to(hidden.device))
            labels = labels[chosen.rows] if chosen.labels is None else chosen.labels
        if not torch.is_grad_enabled():
            losses, _ = self._token_losses(hidden, weight, labels, room)
            result = losses.sum() if chosen.row_loss is None else chosen.row_loss.logprobs(losses)
            return result, result
        logprobs: Tensor | None = None
        scales: float | Tensor = scale
        if chosen.row_loss is not None:
            with torch.no_grad():
                losses, entropies = self._token_losses(
                    hidden[: chosen.learned], weight, labels[: chosen.learned], room, chosen.row_loss.needs_entropies
                )
            logprobs = chosen.row_loss.logprobs(losses)
            weights = chosen.row_loss.weights(losses, entropies) * scale
            if entropies is not None:
                weights = torch.cat([weights, entropies[:, None]], 1)
            weights = weights.view(len(weights), -1)
            scales = F.pad(weights, (0, 0, 0, len(hidden) - len(weights)))
        results: tuple[Tensor, Tensor] = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, weight if rows is None else weight.detach(), labels, scales, rows, chosen.learned, room, self
        )
        scaled, summed = results
        return summed.detach() if logprobs is None else logprobs, scaled

    def _token_losses(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, room: Tensor | None, needs_entropies: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the cross-entropy of each token, fp32 [N], 0 without a label, and the entropies, if needed."""
        losses = torch.zeros(len(hidden), device=hidden.device)
        entropies = torch.zeros_like(losses) if needs_entropies else None
        labels = labels.to(hidden.device)  # labels may stay on the CPU, which chooses the rows
        for a, b in self.row_chunks(hidden, weight):
            logits = self.logits(hidden[a:b], weight, room)
            self.losses_of_logits(logits, labels[a:b], losses[a:b], None if entropies is None else entropies[a:b])
        return losses, entropies

    def room(self, chosen: Chosen, labels: Tensor, weight: Tensor) -> Tensor:
        """Allocate a buffer for the logits of one chunk, before layers save activations.

        Later, the heap may have no free block of this size between saved activations, and would have to grow.
        """
        rows = len(labels) if chosen.rows is None else len(chosen.rows)
        return weight.new_empty(min(rows, self._chunk_rows(weight)), len(weight))

    def logits(self, hidden: Tensor, weight: Tensor, room: Tensor | None = None) -> Tensor:
        """Return logits [N, V], in `room` if it is set.

        oneDNN's AMX kernels take up to 1.5 times as long for all columns at once (`benchmarks/parts.py`). For AMX, the
        product is therefore computed in blocks of columns.
        """
        if room is None:
            room = hidden.new_empty(len(hidden), len(weight))
        logits = room[: len(hidden)]
        if not self.copies_transposed:
            return torch.mm(hidden, weight.t(), out=logits)
        for a in range(0, len(weight), _LOGITS_COLUMNS):
            torch.mm(hidden, weight[a : a + _LOGITS_COLUMNS].t(), out=logits[:, a : a + _LOGITS_COLUMNS])
        return logits

    def row_chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, int]]:
        """Yield the ranges of rows whose logits fit into `logits_bytes`: at least one range, which may be empty."""
        count = self._chunk_rows(weight)
        for start in range(0, max(1, len(hidden)), count):
            yield start, min(start + count, len(hidden))

    def _chunk_rows(self, weight: Tensor) -> int:
        return max(16, self.logits_bytes // (weight.shape[0] * weight.element_size()))

    def column_chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, int]]:
        """Yield ranges of columns whose fp32 logits, over all rows, fit into `logits_bytes`."""
        count = max(16, self.logits_bytes // (4 * max(1, len(hidden))))
        for start in range(0, weight.shape[0], count):
            yield start, min(start + count, weight.shape[0])

    def losses_of_logits(self, logits: Tensor, labels: Tensor, out: Tensor, entropies: Tensor | None = None) -> None:
        """Compute the cross-entropy of each row of logits [N, V] into `out` [N], and its entropy.

        All logits in fp32 would be the largest block of memory of a run, and a fragmented heap would have to grow.
        """
        count = max(1, self.scratch_bytes // (4 * logits.shape[1]))
        for start in self.blocks(range(0, len(logits), count)):
            rows = slice(start, start + count)
            out[rows] = token_cross_entropy(logits[None, rows], labels[rows])
            if entropies is not None:
                entropies[rows] = token_entropies(logits[rows])

    def to_gradient_(self, logits: Tensor, labels: Tensor, scale: float | Tensor, normalizers: Tensor) -> Tensor:
        """Replace logits [N, V] by `scale` times the gradient of their summed cross-entropy; return the sum, in fp32.

        `normalizers` [N] is set to the log-sum-exp of each row.
        """
        summed = torch.zeros((), device=logits.device)
        count = max(1, self.scratch_bytes // (4 * logits.shape[1]))
        convert = to_gradient_compiled_ if self.compiled else to_gradient_
        if self.compiled:
            count = max(_ALIGNED_ROWS, count // _ALIGNED_ROWS * _ALIGNED_ROWS)
        for start in self.blocks(range(0, len(logits), count)):
            stop = start + count
            scales = scale[start:stop] if isinstance(scale, Tensor) else scale
            loss_of_rows, normalizers[start:stop] = convert(logits[start:stop], labels[start:stop], scales)
            summed += loss_of_rows
        return summed


def choose(labels: Tensor, row_loss: RowLoss | None = None) -> Chosen:
    """Return the tokens that enter the loss of labels [T], on the device of the labels."""
    labelled = labels != IGNORE
    learned = int(labelled.sum())
    rows = None if learned == len(labels) else _labelled_first(labelled)
    return Chosen(rows, learned, row_loss and row_loss.compact())


def _labelled_first(labelled: Tensor) -> Tensor:
    """Return the tokens with a label, then tokens without a label, up to a multiple of an eighth of all tokens.

    oneDNN caches a kernel for every shape of product, so the number of rows should have few different values.
    """
    with_label, without_label = labelled.nonzero().flatten(), (~labelled).nonzero().flatten()
    step = -(-len(labelled) // LOGITS_ROW_COUNTS)
    return torch.cat([with_label, without_label[: -len(with_label) % step]])


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: float | Tensor,
        rows: GradientRows | None,
        learned: int,
        room: Tensor | None,
        fused: FusedLoss,
    ) -> tuple[Tensor, Tensor]:
        chunks = list(fused.row_chunks(hidden, weight))
        summed = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # The log-sum-exp of each row of logits; infinite for tokens without a label, whose probabilities become 0.
        normalizers = torch.full((len(labels),), float("inf"), device=hidden.device)
        logits = hidden.new_empty(0, weight.shape[0])
        for a, b in chunks:
            logits = fused.logits(hidden[a:b], weight, room)
            end = min(max(a, learned), b)  # tokens with a label come first
            scales = scale[a:end] if isinstance(scale, Tensor) else scale
            summed += fused.to_gradient_(logits[: end - a], labels[a:end], scales, normalizers[a:end])
            logits[end - a :].zero_()
            if hidden_gradient is not None:
                torch.mm(logits, weight, out=hidden_gradient[a:b])
        whole = logits if len(chunks) == 1 else None

        def fill(a: int, b: int, out: Tensor) -> None:
            columns = whole[:, a:b] if whole is not None else _columns(hidden, weight, labels, scale, normalizers, a, b)
            if hidden_copy is None:
                torch.mm(columns.t(), hidden, out=out)
            else:
                _transposed_product(hidden_copy, columns, out)

        learns = rows is not None or ctx.needs_input_grad[1]
        copies = learns and fused.copies_transposed and copy_pays(len(weight), *hidden.shape)
        hidden_copy = hidden.t().contiguous() if copies else None
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
        return summed.clone() if isinstance(scale, Tensor) else summed * scale, summed

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor, _summed: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        ctx.gradients = (None, None)
        return *gradients, None, None, None, None, None, None


def _columns(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float | Tensor, normalizers: Tensor, a: int, b: int
) -> Tensor:
    """Recompute columns [a, b) of the gradient of the logits, [T, b - a]."""
    values = F.linear(hidden, weight[a:b]).float().sub_(normalizers[:, None])
    factors, weights = gradient_factors(values.clone() if has_entropies(scale) else values, scale)
    values.exp_().mul_(factors)
    inside = (labels >= a) & (labels < b)
    values.scatter_add_(1, (labels - a).clamp(0, b - a - 1)[:, None], inside[:, None].float() * -weights)
    return values.to(hidden.dtype)


def _transposed_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Compute out [V, E] = (left [E, T] @ right [T, V]).t(), because the result is the smallest matrix to transpose."""
    for a in range(0, right.shape[1], _COLUMNS):
        out[a : a + _COLUMNS] = torch.mm(left, right[:, a : a + _COLUMNS]).t()
