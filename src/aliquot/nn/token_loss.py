"""A loss of the caller: a function of the log-probabilities of the tokens of a sequence, with exact gradients.

As for preferences (nn/preference_loss.py), the loss depends on the model only through log-probabilities. Its gradient
is therefore a weighted cross-entropy: every token has the weight -dL/d(log-probability), which autograd computes from
the caller's function. The function never sees logits, which stay in chunks (nn/head_loss.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor

from aliquot.core.errors import UsageError, describe_failure
from aliquot.machine.device_copies import send

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
class TokenLoss:
    """The loss of the groups of sequences in a row of tokens. It takes the place of `Answers` in a micro-batch."""

    groups: Sequence[Group]
    function: LossFunction | None  # None: only log-probabilities are computed
    places: Tensor  # int64 [L], the index of each learned token among the losses of tokens
    outcome: LossOutcome = field(default_factory=LossOutcome)  # shared by copies, which the engine makes

    def to(self, device: torch.device) -> Self:
        """Copy the tensors to `device` asynchronously."""
        return replace(self, places=send(self.places, device))

    def select(self, rows: Tensor) -> Self:
        """Return the loss for a vector that begins with the losses of these learned tokens, in their order."""
        return replace(self, places=torch.arange(len(rows), device=self.places.device))

    def logprobs(self, losses: Tensor) -> Tensor:
        """Return the log-probability of each learned token, fp32 [L], from the loss of each token."""
        return -losses[self.places]

    @property
    def needs_entropies(self) -> bool:
        """Whether the function has a parameter `entropies`."""
        return self.function is not None and "entropies" in signature(self.function).parameters

    def weights(self, logprobs: Tensor, entropies: Tensor | None = None) -> Tensor:
        """Return the weight of each token in the cross-entropy that has the gradient of the summed loss, fp32 [T].

        With `entropies` of all tokens, fp32 [T], the weights are [T, 2]: also those of the entropies. An error of the
        caller's function is recorded, because all ranks must finish the micro-batch together. The gradient is then 0.
        """
        leaves = [logprobs.detach().cpu().requires_grad_()]
        if entropies is not None:
            leaves.append(entropies[self.places].detach().cpu().requires_grad_())
        weights = torch.zeros(int(self.places[-1]) + 1 if len(self.places) else 0, len(leaves), device=logprobs.device)
        assert self.function is not None
        try:
            with torch.enable_grad():
                total = torch.stack([_checked(loss) for loss in self._losses(self.function, *leaves)]).sum()
                gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
            if not all(tensor.isfinite().all() for tensor in (total, *gradients)):
                raise ValueError("the loss or its gradient is not finite")
        except Exception as error:
            self.outcome.failure = describe_failure(self.function, f"{loss_name(self.function)} failed", error)
        else:
            self.outcome.total = total.item()
            # The cross-entropy is the negative log-probability.
            weights[self.places] = torch.stack([-gradients[0], *gradients[1:]], 1).to(weights)
        return weights if len(leaves) > 1 else weights[:, 0]

    def split(self, logprobs: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the log-probabilities [L] by group and sequence."""
        shapes = [sequence.labels.shape for group in self.groups for sequence in group]
        pieces = iter(torch.split(logprobs, [shape.numel() for shape in shapes]))
        values = iter([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        return [tuple(next(values) for _ in group) for group in self.groups]

    def metrics(self, _: Tensor) -> dict[str, float]:
        return {"loss": self.outcome.total}

    def _losses(self, function: LossFunction, *leaves: Tensor) -> list[Tensor]:
        """Return the loss of each group. The function gets tuples if a group has several sequences."""
        pieces = [self.split(leaf) for leaf in leaves]
        losses = []
        for group, *values in zip(self.groups, *pieces, strict=True):
            named = dict(zip(("logprobs", "entropies"), values, strict=False))
            if len(group) == 1:
                named = {name: tensors[0] for name, tensors in named.items()}
            logprobs = named.pop("logprobs")
            losses.append(function(logprobs, group[0] if len(group) == 1 else group, **named))
        return losses


def loss_name(function: LossFunction | None) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"a loss must be a scalar tensor, not {what}")
    if not loss.requires_grad:
        raise ValueError("the loss has no gradient: compute it from the log-probabilities")
    return loss.reshape(())
