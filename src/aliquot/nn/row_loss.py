"""A loss that replaces the cross-entropy of a row of tokens: a function of the log-probabilities of learned tokens.

Such a loss depends on the model only through log-probabilities. Its gradient is therefore a weighted cross-entropy:
every token has the weight -dL/d(log-probability), which autograd computes. The output head computes all
log-probabilities first, and then the gradient with these weights (nn/head_loss.py), so that logits stay in chunks.
Preferences (nn/preference_loss.py) and functions of the caller (nn/token_loss.py) are such losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from aliquot.machine.device_copies import send


@dataclass(frozen=True)
class RowLoss(ABC):
    """The loss of the answers, or of the caller's sequences, in a row of T tokens, of which L are learned."""

    tokens: Tensor  # int64 [L], the index of each learned token among the T losses of tokens

    @property
    def needs_entropies(self) -> bool:
        """Whether the loss also depends on the entropy of the prediction of each learned token."""
        return False

    @property
    def failure(self) -> str | None:
        """The error of the caller's function, after `weights`."""
        return None

    @abstractmethod
    def total(self, logprobs: Tensor, entropies: Tensor | None = None) -> Tensor:
        """Return the summed loss, a scalar, from the log-probability of each learned token, fp32 [L]."""

    @abstractmethod
    def metrics(self, logprobs: Tensor) -> dict[str, float]:
        """Return the sums of the loss and of further metrics, from log-probabilities as for `total`."""

    def to(self, device: torch.device) -> Self:
        """Copy the tensors to `device` asynchronously."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: send(tensor, device) for name, tensor in tensors.items()})

    def compact(self) -> Self:
        """Return this loss for a vector of the losses of only the learned tokens, in their order."""
        return replace(self, tokens=torch.arange(len(self.tokens), device=self.tokens.device))

    def logprobs(self, losses: Tensor) -> Tensor:
        """Return the log-probability of each learned token, fp32 [L], from the loss of each token, fp32 [T]."""
        return -losses[self.tokens]

    def weights(self, losses: Tensor, entropies: Tensor | None = None) -> Tensor:
        """Return the weight of each token in the cross-entropy that has the gradient of the summed loss, fp32 [T].

        With `entropies` of all tokens, fp32 [T], the weights are [T, 2]: also those of the entropies.
        """
        values = [self.logprobs(losses), *([] if entropies is None else [entropies[self.tokens]])]
        leaves = [value.detach().requires_grad_() for value in values]
        with torch.enable_grad():
            gradients = self.gradients(leaves)
        # The cross-entropy is the negative log-probability.
        columns = torch.stack([-gradients[0], *gradients[1:]], 1)
        return columns.new_zeros(len(losses), len(leaves)).index_copy_(0, self.tokens, columns).squeeze(1)

    def gradients(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradient of the summed loss for each of `leaves`, the arguments of `total`."""
        return torch.autograd.grad(self.total(*leaves), leaves, materialize_grads=True)
