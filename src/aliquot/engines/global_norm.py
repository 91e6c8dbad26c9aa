"""The global gradient norm, the same number on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from aliquot.optim.squared_norm import squared_norm


def global_norm(gradients: Sequence[Tensor], device: torch.device) -> float:
    """The norm of all ranks' flat `gradients`; every rank adds the same numbers, exactly. Collective.

    nan where any gradient is not finite.
    """
    own = torch.tensor([squared_norm(gradient) for gradient in gradients], dtype=torch.float64, device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    squares = torch.cat(parts).cpu()
    return math.sqrt(math.fsum(squares.tolist())) if bool(squares.isfinite().all()) else math.nan
