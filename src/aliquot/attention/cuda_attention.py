"""Attention on a GPU: torch's kernels, one call a document. Written for CUDA and not yet run on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from aliquot.attention.causal import Kernel, causal

if TYPE_CHECKING:
    from aliquot.attention.base import Documents, Scoring


@dataclass(frozen=True)
class CudaAttention:
    kernel: Kernel = F.scaled_dot_product_attention

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
        outputs = [
            causal(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scoring, self.kernel)
            for a, b in pairwise(documents.edges)
        ]
        return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()

    def on_meta(self) -> CudaAttention:
        return CudaAttention(_flash)


def _flash(query: Tensor, key: Tensor, value: Tensor, *, scale: float, **_: object) -> Tensor:
    """The kernel that a GPU would choose: on meta tensors torch would multiply out all scores."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out: Tensor = flash(query, key, value, 0.0, True, False, scale=scale)[0]
    return out
