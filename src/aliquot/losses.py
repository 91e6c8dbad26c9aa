"""Losses for `Trainer.forward_backward`: functions of log-probabilities (fp32 [L]) and of the sequence they belong to.

Each returns a sum over the learned tokens of a sequence. The arrays that a loss reads are named in its description.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aliquot.nn.preference_loss import Objective
from aliquot.nn.token_loss import Group, LossFunction, TokenSequence


def cross_entropy(logprobs: Tensor, sequence: TokenSequence) -> Tensor:
    """Return the cross-entropy, weighted by `weights` if the sequence has them."""
    return -(logprobs * sequence["weights"]).sum() if "weights" in sequence.arrays else -logprobs.sum()


def importance_sampling(logprobs: Tensor, sequence: TokenSequence) -> Tensor:
    """Return the policy-gradient loss of tokens drawn with other weights: -(p / q) x advantage.

    Arrays: `advantages`, and `logprobs`, the log-probabilities log q at the time of drawing.
    """
    return -((logprobs - sequence["logprobs"]).exp() * sequence["advantages"]).sum()


def ppo(clip_low: float = 0.2, clip_high: float = 0.2) -> LossFunction:
    """Return PPO's loss, whose ratio p / q is clipped to [1 - clip_low, 1 + clip_high]; also GRPO's and DAPO's.

    Arrays: as for `importance_sampling` (Schulman et al. 2017, equation 7).
    """

    def loss(logprobs: Tensor, sequence: TokenSequence) -> Tensor:
        ratio, advantages = (logprobs - sequence["logprobs"]).exp(), sequence["advantages"]
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages).sum()

    return loss


def cispo(clip_low: float = 1.0, clip_high: float = 4.0) -> LossFunction:
    """Return CISPO's loss, whose clipped ratio is a weight without gradient, so that every token has a gradient.

    Arrays: as for `importance_sampling` (MiniMax-M1 2025, equation 4).
    """

    def loss(logprobs: Tensor, sequence: TokenSequence) -> Tensor:
        ratio = (logprobs - sequence["logprobs"]).exp().clamp(1 - clip_low, 1 + clip_high)
        return -(ratio.detach() * sequence["advantages"] * logprobs).sum()

    return loss


def dpo(beta: float = 0.1) -> LossFunction:
    """Return the DPO loss of a tuple (chosen, rejected).

    Array: `reference`, the log-probabilities of the model before training (Rafailov et al. 2023, equation 7).
    """
    objective = Objective("dpo", beta)

    def loss(logprobs: tuple[Tensor, Tensor], pair: Group) -> Tensor:
        sums = torch.stack([values.sum() for values in logprobs])[None]
        reference = torch.stack([sequence["reference"].sum() for sequence in pair])[None]
        return objective.losses(sums, reference, torch.ones_like(sums)).sum()

    return loss
