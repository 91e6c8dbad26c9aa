"""A loss of the caller: a function of the log-probabilities of the tokens of a sequence, with exact gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from aliquot.core.errors import UsageError, describe_failure
from aliquot.nn.row_loss import RowLoss

LossFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class TokenSequence:
    """Token ids to train on, with values for each token.

    Attributes:
        ids: The token ids, at least two.
        learned: Whether each token enters the loss. None: every token but the first, which nothing predicts.
        arrays: Values by name, for example advantages: one number for all tokens, or a number or a list of numbers for
            each id, or for each learned token, as `Trainer.forward` returns them.
        targets: K token ids for each token, whose log-probabilities at its place the loss gets, as [L, K]; for example
            the most likely tokens of a teacher. None: the token itself.
    """

    ids: Sequence[int]
    learned: Sequence[bool] | None = None
    arrays: Mapping[str, float | Sequence[float] | Sequence[Sequence[float]]] = field(default_factory=dict)
    targets: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for name, values in [("learned", self.learned), ("targets", self.targets), *self.arrays.items()]:
            if isinstance(values, Sequence | Tensor) and len(values) != len(self.ids):
                if name in self.arrays and len(values) == int(self.mask.sum()):
                    continue
                raise UsageError(
                    f"a sequence has {len(self.ids)} ids, but {len(values)} values of {name}: give as many"
                )
        if len(self.ids) < 2 or not self.mask.any():
            raise UsageError("a sequence has no token to learn: give at least two ids, and learn one after the first")

    def __getitem__(self, name: str) -> Tensor:
        """Return the values of the learned tokens, fp32 [L] or [L, K], in the order of their log-probabilities."""
        if name not in self.arrays:
            raise KeyError(f"the sequence has no array {name}, only {', '.join(self.arrays) or 'ids'}")
        values, mask = torch.as_tensor(self.arrays[name], dtype=torch.float32), self.mask
        if values.ndim == 0:
            return values.expand(int(mask.sum()))
        return values[mask] if len(values) == len(mask) else values

    @property
    def mask(self) -> Tensor:
        """Whether each token enters the loss, bool [T]; never the first."""
        learned = [True] * len(self.ids) if self.learned is None else self.learned
        mask = torch.as_tensor(learned, dtype=torch.bool).clone()
        mask[0] = False
        return mask

    @property
    def labels(self) -> Tensor:
        """The token ids whose log-probabilities the loss gets, int64 [L], or [L, K] with `targets`."""
        return torch.as_tensor(self.ids if self.targets is None else self.targets)[self.mask]


Group = tuple[TokenSequence, ...]  # sequences with a common loss, for example a pair of answers


@dataclass
class LossOutcome:
    """The result of the caller's function on a micro-batch."""

    total: float = 0.0  # summed over the groups
    failure: str | None = None  # the error of the function


@dataclass(frozen=True)
class TokenLoss(RowLoss):
    """The loss of the groups of sequences in a row of tokens."""

    groups: Sequence[Group]
    function: LossFunction | None  # None: only log-probabilities are computed
    outcome: LossOutcome = field(default_factory=LossOutcome)  # shared by copies, which the engine makes

    @property
    def needs_entropies(self) -> bool:
        return self.function is not None and "entropies" in signature(self.function).parameters

    @property
    def failure(self) -> str | None:
        return self.outcome.failure

    def total(self, logprobs: Tensor, entropies: Tensor | None = None) -> Tensor:
        """Return the summed loss of all groups. The function gets tuples if a group has several sequences."""
        assert self.function is not None
        pieces = [self.split(values.cpu()) for values in (logprobs, entropies) if values is not None]
        losses = []
        for group, *values in zip(self.groups, *pieces, strict=True):
            named = dict(zip(("logprobs", "entropies"), values, strict=False))
            if len(group) == 1:
                named = {name: tensors[0] for name, tensors in named.items()}
            result = self.function(named.pop("logprobs"), group[0] if len(group) == 1 else group, **named)
            losses.append(_checked(result))
        total = torch.stack(losses).sum()
        self.outcome.total = total.item()
        return total

    def gradients(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients, or zeros if the function fails, because all ranks must finish the micro-batch."""
        try:
            gradients = super().gradients(leaves)
            if not math.isfinite(self.outcome.total) or not all(gradient.isfinite().all() for gradient in gradients):
                raise ValueError("the loss or its gradient is not finite")
        except Exception as error:
            assert self.function is not None
            self.outcome.failure = describe_failure(self.function, f"{loss_name(self.function)} failed", error)
            return tuple(map(torch.zeros_like, leaves))
        return gradients

    def split(self, logprobs: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the log-probabilities [L] by group and sequence."""
        shapes = [sequence.labels.shape for group in self.groups for sequence in group]
        pieces = iter(torch.split(logprobs, [shape.numel() for shape in shapes]))
        values = iter([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        return [tuple(next(values) for _ in group) for group in self.groups]

    def metrics(self, logprobs: Tensor) -> dict[str, float]:
        """Return the summed loss that `weights` has computed."""
        return {"loss": self.outcome.total}


def loss_name(function: LossFunction | None) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"a loss must be a scalar tensor, not {what}")
    if not loss.requires_grad:
        raise ValueError("the loss has no gradient: compute it from the log-probabilities")
    return loss.reshape(())
