"""The head loss as it is defined: all logits, cross-entropy, and autograd for the rest. What the others must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aliquot.nn.head_loss import Chosen, GradientRows
from aliquot.nn.logits_gradient import IGNORE


def reference_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: float,
    rows: GradientRows | None = None,
    chosen: Chosen | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what FusedLoss computes, in the dtype of its inputs."""
    own = weight if rows is None else weight.detach().requires_grad_()
    summed = F.cross_entropy(F.linear(hidden, own), labels, ignore_index=IGNORE, reduction="sum")
    if rows is not None:
        (gradient,) = torch.autograd.grad(summed * scale, own, retain_graph=True)
        for a, b in rows.blocks():
            rows.buffer(a, b).copy_(gradient[a:b])
            rows.publish()
    return summed.detach(), summed * scale
