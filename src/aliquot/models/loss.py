"""The training loss: cross-entropy summed over the tokens that have a label, in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from aliquot.models.batch import IGNORE

if TYPE_CHECKING:
    from torch import Tensor


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [1, T, V] of any float dtype, labels int64 [T] already shifted -> fp32 scalar, a sum, not a mean."""
    return F.cross_entropy(logits[0].float(), labels, ignore_index=IGNORE, reduction="sum")
