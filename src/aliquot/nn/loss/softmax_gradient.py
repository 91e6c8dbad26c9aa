"""Logits become their gradient where they lie: by a dozen operations over a few rows, or on a GPU by few
compiled kernels, which read them two or three times and write them once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aliquot.machine.torch_compile import compiled


def to_gradient_(logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Replace logits [N, V] by `scale` times the gradient of their summed cross-entropy with labels int64 [N].

    -> that sum, and the log of the sum of the exponentials [N], in fp32.
    """
    values, wanted = logits.float(), labels[:, None]
    targets, largest = values.gather(1, wanted), values.amax(1, keepdim=True)
    probabilities = torch.softmax(values, 1)
    # The largest probability is 1 / the sum of exp(logit - largest), and never tiny.
    normalizers = largest - probabilities.amax(1, keepdim=True).log()
    summed = (normalizers - targets).sum()
    probabilities.mul_(scale).scatter_add_(1, wanted, torch.full_like(targets, -scale))
    logits.copy_(probabilities)
    return summed, normalizers[:, 0]


def _traced(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    values = logits.float()
    normalizers = values.logsumexp(1)
    targets = values.gather(1, labels[:, None])[:, 0]
    columns = torch.arange(logits.shape[1], device=logits.device)
    values.sub_(normalizers[:, None]).exp_().sub_((columns == labels[:, None]).float()).mul_(scale)
    logits.copy_(values)
    return (normalizers - targets).sum(), normalizers


@cache
def _compiled() -> Callable[..., Any]:
    return compiled(_traced)


def to_gradient_compiled_(logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same. What has been compiled takes any number of rows, and any scale: as a number it would be a constant."""
    result: tuple[Tensor, Tensor] = _compiled()(logits, labels, torch.full((), scale, device=logits.device))
    return result
