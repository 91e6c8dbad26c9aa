"""Cross-entropies and entropies of logits, and their gradient, which replaces the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from aliquot.machine.torch_compile import compile_function

IGNORE = -100  # the label of tokens that do not enter the loss


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each token, fp32 [T], of logits [1, T, V] of any dtype with shifted labels int64 [T].

    It is 0 for tokens without a label.
    """
    return F.cross_entropy(logits[0].float(), labels, ignore_index=IGNORE, reduction="none")


def token_entropies(logits: Tensor) -> Tensor:
    """Return the entropy of each token's distribution, in nats, fp32 [T], of logits [T, V]."""
    logprobs = logits.float().log_softmax(1)
    return -(logprobs.exp() * logprobs).sum(1)


def to_gradient_(logits: Tensor, labels: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Replace logits [N, V] by `scale` times the gradient of their summed cross-entropy with labels int64 [N].

    A scale [N, 1] applies to each row. A scale [N, 3] has the weight of the cross-entropy of each row, the weight of
    its entropy, whose gradient is added, and its entropy. Return the summed cross-entropy, and the log-sum-exp of each
    row [N], in fp32.
    """
    values, columns = logits.float(), labels[:, None]
    targets, largest = values.gather(1, columns), values.amax(1, keepdim=True)
    probabilities = torch.softmax(values, 1)
    # The largest probability is 1 / sum of exp(logit - largest). It is never tiny, so its logarithm is precise.
    normalizers = largest - probabilities.amax(1, keepdim=True).log()
    summed = (normalizers - targets).sum()
    factors, weights = gradient_factors(values - normalizers if has_entropies(scale) else values, scale)
    probabilities.mul_(factors).scatter_add_(1, columns, torch.full_like(targets, -1.0) * weights)
    logits.copy_(probabilities)
    return summed, normalizers[:, 0]


def has_entropies(scale: float | Tensor) -> bool:
    return isinstance(scale, Tensor) and scale.ndim == 2 and scale.shape[1] == 3


def gradient_factors(logprobs: Tensor, scale: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
    """Return the factor of each probability in the gradient of the logits, and the weight of the cross-entropy.

    The gradient of an entropy H is -p (log p + H). Only for entropies, `logprobs` [N, V] are used.
    """
    if not has_entropies(scale):
        return scale, scale
    weights, entropy_weights, entropies = cast("Tensor", scale).unbind(1)
    finite = logprobs.clamp(min=-1e4)  # the factor of a probability of 0 must not be infinite
    factors = weights[:, None] - entropy_weights[:, None] * (finite + entropies[:, None])
    return factors, weights[:, None]


def _traced(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    values = logits.float()
    normalizers = values.logsumexp(1)
    targets = values.gather(1, labels[:, None])[:, 0]
    columns = torch.arange(logits.shape[1], device=logits.device)
    values.sub_(normalizers[:, None])
    factors, weights = gradient_factors(values, scale)
    logits.copy_(values.exp() * factors - (columns == labels[:, None]).float() * weights)
    return (normalizers - targets).sum(), normalizers


@cache
def _compiled() -> Callable[..., Any]:
    return compile_function(_traced)


def to_gradient_compiled_(logits: Tensor, labels: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Compute `to_gradient_` with a compiled kernel, for any number of rows.

    The kernel gets the scale as a tensor, because torch.compile would turn a number into a constant.
    """
    scales = scale if isinstance(scale, Tensor) else torch.full((), scale, device=logits.device)
    return cast("tuple[Tensor, Tensor]", _compiled()(logits, labels, scales))
