"""Losses of preference training: DPO, SimPO and ORPO, as functions of the log-probabilities of pairs of answers.

The loss of a pair depends on the model only through the log-probability of the chosen and of the rejected answer. Its
gradient is therefore a weighted cross-entropy: every token of an answer has the weight -dL/d(log-probability). The
output head computes all log-probabilities first, and then the gradient with these weights (nn/head_loss.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from aliquot.machine.device_copies import send

Name = Literal["dpo", "simpo", "orpo"]
LossType = Literal["sigmoid", "ipo", "hinge", "robust"]


@dataclass(frozen=True)
class Objective:
    """A loss of pairs and its settings, under TRL's names. `loss_type` is for DPO, `simpo_gamma` for SimPO."""

    name: Name
    beta: float = 0.1
    loss_type: LossType = "sigmoid"
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with the model before training."""
        return self.name == "dpo"

    def losses(self, logprobs: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
        """Return the loss of each pair [P].

        Arguments are [P, 2]: the log-probabilities of (chosen, rejected) answers, the same before training, and the
        numbers of tokens of the answers.
        """
        if self.name == "dpo":
            return self._dpo_losses(logprobs - reference, lengths)
        means = logprobs / lengths
        margins = means[:, 0] - means[:, 1]
        if self.name == "simpo":
            return self._smoothed(self.beta * margins - self.simpo_gamma)
        odds = margins - (_log_complement(means[:, 0]) - _log_complement(means[:, 1]))
        return -means[:, 0] - self.beta * F.logsigmoid(odds)

    def rewards(self, logprobs: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
        """Return the implicit rewards of (chosen, rejected) answers, [P, 2]; arguments as for `losses`."""
        return self.beta * (logprobs - reference if self.needs_reference else logprobs / lengths)

    def _dpo_losses(self, ratios: Tensor, lengths: Tensor) -> Tensor:
        if self.loss_type == "ipo":  # with mean log-probabilities, as the authors of IPO confirmed to TRL
            means = ratios / lengths
            return (means[:, 0] - means[:, 1] - 1 / (2 * self.beta)).square()
        margins = self.beta * (ratios[:, 0] - ratios[:, 1])
        if self.loss_type == "hinge":
            return torch.relu(1 - margins)
        if self.loss_type == "robust":
            flipped = self.label_smoothing * F.logsigmoid(-margins)
            return (flipped - (1 - self.label_smoothing) * F.logsigmoid(margins)) / (1 - 2 * self.label_smoothing)
        return self._smoothed(margins)

    def _smoothed(self, margins: Tensor) -> Tensor:
        share = self.label_smoothing
        return -(1 - share) * F.logsigmoid(margins) - share * F.logsigmoid(-margins)


def _log_complement(logprobs: Tensor) -> Tensor:
    """Return log(1 - exp(logprobs)), which is finite because a probability of 1 counts as slightly less."""
    return (-torch.expm1(logprobs.clamp(max=-1e-7))).log()


@dataclass(frozen=True)
class Pairs:
    """The P pairs of answers in a row of tokens: answer 2p is the chosen answer of pair p, answer 2p + 1 the rejected.

    `answers` may be shorter than the row, because further documents have no labels.
    """

    objective: Objective
    answers: Tensor  # int64 [T], the answer to which each token belongs; any number for a token without a label
    lengths: Tensor  # fp32 [P, 2], number of labels of each answer
    reference: Tensor  # fp32 [P, 2], log-probabilities before training; 0 if the objective does not use them
    documents: tuple[int, ...] = ()  # [2 P], the number of each answer in its token store

    def to(self, device: torch.device) -> Pairs:
        """Copy the tensors to `device` asynchronously."""
        answers, lengths, reference = (send(tensor, device) for tensor in self.tensors())
        return replace(self, answers=answers, lengths=lengths, reference=reference)

    def tensors(self) -> list[Tensor]:
        return [self.answers, self.lengths, self.reference]

    def select(self, rows: Tensor) -> Pairs:
        """Return the pairs with only the `rows` of `answers`."""
        return replace(self, answers=self.answers[rows])

    def logprobs(self, losses: Tensor) -> Tensor:
        """Return the log-probability of each answer, fp32 [P, 2], from the cross-entropy of each token."""
        sums = torch.zeros(self.lengths.numel(), dtype=torch.float64, device=losses.device)
        return -sums.index_add_(0, self.answers, losses[: len(self.answers)].double()).view(-1, 2).float()

    def weights(self, logprobs: Tensor) -> Tensor:
        """Return the weight of each token in the cross-entropy that has the gradient of the summed loss, fp32 [T]."""
        with torch.enable_grad():
            leaf = logprobs.detach().requires_grad_()
            summed = self.objective.losses(leaf, self.reference, self.lengths).sum()
            gradient = torch.autograd.grad(summed, leaf)[0]
        return -gradient.view(-1)[self.answers]

    def metrics(self, logprobs: Tensor) -> dict[str, float]:
        """Return the sums over all pairs of the loss and of TRL's metrics."""
        logprobs = logprobs.to(self.lengths.device)
        rewards = self.objective.rewards(logprobs, self.reference, self.lengths)
        margins = rewards[:, 0] - rewards[:, 1]
        values = {
            "loss": self.objective.losses(logprobs, self.reference, self.lengths),
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "rewards/accuracies": (margins > 0).float(),
            "rewards/margins": margins,
            "logps/chosen": logprobs[:, 0],
            "logps/rejected": logprobs[:, 1],
        }
        sums = torch.stack([value.double().sum() for value in values.values()])
        return dict(zip(values, sums.tolist(), strict=True))
