"""Losses of preference training: DPO, SimPO, ORPO and KTO, as functions of the log-probabilities of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from aliquot.nn.row_loss import RowLoss

Name = Literal["dpo", "simpo", "orpo", "kto"]


@dataclass(frozen=True)
class Objective:
    """A loss of answers and its settings, under TRL's names.

    `loss_type` is for DPO, `simpo_gamma` for SimPO; `desirable_weight` and `undesirable_weight` are for KTO.
    """

    name: Name
    beta: float = 0.1
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with the model before training."""
        return self.name in ("dpo", "kto")

    @property
    def rates_answers(self) -> bool:
        """Whether the loss is of single answers, each desirable or not, instead of pairs."""
        return self.name == "kto"

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
        """Return the implicit rewards of answers, in the shape of the arguments; arguments as for `losses`."""
        return self.beta * (logprobs - reference if self.needs_reference else logprobs / lengths)

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Return the means of metrics from their sums over `count` pairs or rated answers (`Answers.metrics`).

        The rewards and log-probabilities of desirable and of undesirable answers have means of their own. A metric of
        answers that do not occur is left out.
        """
        if not self.rates_answers:
            return {name: value / count for name, value in sums.items()}
        counts = {"chosen": sums[_DESIRABLE], "rejected": count - sums[_DESIRABLE]}
        divisors = {name: counts.get(name.partition("/")[2], count) for name in sums if name != _DESIRABLE}
        means = {name: sums[name] / divisor for name, divisor in divisors.items() if divisor}
        if all(counts.values()):
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means

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


_DESIRABLE = "desirable"  # the number of desirable answers, in `RatedAnswers.metrics`


def _log_complement(logprobs: Tensor) -> Tensor:
    """Return log(1 - exp(logprobs)), which is finite because a probability of 1 counts as slightly less."""
    return (-torch.expm1(logprobs.clamp(max=-1e-7))).log()


@dataclass(frozen=True)
class Answers(RowLoss):
    """The answers in a row of tokens: P pairs with two answers each, or A rated answers, which are A groups of one."""

    objective: Objective
    numbers: Tensor  # int64 [L], the answer to which each learned token belongs
    lengths: Tensor  # fp32 [P, 2] or [A, 1], number of labels of each answer
    reference: Tensor  # the same shape, log-probabilities before training; 0 if the objective does not use them
    places: tuple[int, ...] = ()  # index of each answer in `TokenStore.reference`

    def total(self, logprobs: Tensor, entropies: Tensor | None = None) -> Tensor:
        return self.losses(self.sums(logprobs)).sum()

    def sums(self, logprobs: Tensor) -> Tensor:
        """Return the log-probability of each answer, fp32 in the shape of `lengths`, from that of each token."""
        sums = torch.zeros(self.lengths.numel(), dtype=torch.float64, device=logprobs.device)
        return sums.index_add(0, self.numbers.to(logprobs.device), logprobs.double()).view(self.lengths.shape).float()

    def summed_ratios(self, logprobs: Tensor) -> float:
        """Return the sum of the log-ratios, log(p / reference), of all answers."""
        return float((self.sums(logprobs).to(self.reference.device) - self.reference).double().sum())

    def without_tokens(self, logprobs: Tensor) -> tuple[Self, Tensor]:
        """Return answers of one token each, and its log-probability: they have the same losses and metrics."""
        sums = self.sums(logprobs).cpu().view(-1)
        return replace(self, tokens=torch.arange(len(sums)), numbers=torch.arange(len(sums))), sums

    def losses(self, logprobs: Tensor) -> Tensor:
        """Return the loss of each pair, from the log-probabilities of answers."""
        return self.objective.losses(logprobs, self.reference, self.lengths)

    def metrics(self, logprobs: Tensor) -> dict[str, float]:
        """Return the sums over all pairs of the loss and of TRL's metrics."""
        logprobs = self.sums(logprobs).to(self.lengths.device)
        rewards = self.objective.rewards(logprobs, self.reference, self.lengths)
        margins = rewards[:, 0] - rewards[:, 1]
        return _sums(
            {
                "loss": self.losses(logprobs),
                "rewards/chosen": rewards[:, 0],
                "rewards/rejected": rewards[:, 1],
                "rewards/accuracies": (margins > 0).float(),
                "rewards/margins": margins,
                "logps/chosen": logprobs[:, 0],
                "logps/rejected": logprobs[:, 1],
            }
        )


@dataclass(frozen=True)
class RatedAnswers(Answers):
    """Answers of which each is desirable or not, for KTO.

    The loss compares the log-ratio of an answer with `divergence`, the mean log-ratio of mismatched answers, but at
    least 0 (Ethayarajh et al. 2024, equation 7).
    """

    desirable: Tensor = field(kw_only=True)  # bool [A]
    divergence: float = 0.0

    def losses(self, logprobs: Tensor) -> Tensor:
        """Return the loss of each answer, from the log-probabilities of answers."""
        objective, above = self.objective, (logprobs - self.reference)[:, 0] - self.divergence
        good = objective.desirable_weight * (1 - torch.sigmoid(objective.beta * above))
        bad = objective.undesirable_weight * (1 - torch.sigmoid(-objective.beta * above))
        return torch.where(self.desirable, good, bad)

    def metrics(self, logprobs: Tensor) -> dict[str, float]:
        """Return the sums of the loss and of TRL's metrics, over all, desirable ("chosen") or undesirable answers."""
        logprobs = self.sums(logprobs).to(self.lengths.device)
        rewards = self.objective.rewards(logprobs, self.reference, self.lengths)[:, 0]
        chosen, rejected = self.desirable.double(), (~self.desirable).double()
        return _sums(
            {
                "loss": self.losses(logprobs),
                "kl": torch.full_like(chosen, self.divergence),
                "rewards/chosen": rewards * chosen,
                "rewards/rejected": rewards * rejected,
                "logps/chosen": logprobs[:, 0] * chosen,
                "logps/rejected": logprobs[:, 0] * rejected,
                _DESIRABLE: chosen,
            }
        )


def _sums(values: dict[str, Tensor]) -> dict[str, float]:
    sums = torch.stack([value.double().sum() for value in values.values()])
    return dict(zip(values, sums.tolist(), strict=True))
