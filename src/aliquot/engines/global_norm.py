"""Combine the ranks' sums of squares to the global norm of the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist


def global_norm(squares: Sequence[float], device: torch.device) -> float:
    """Return the norm of all ranks' gradients, equal on every rank; NaN if a gradient is not finite. Collective.

    `squares`: this rank's sum of squares of each weight; `device`: of the collective's tensors.
    """
    local = torch.tensor(list(squares), dtype=torch.float64, device=device)
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    gathered = torch.cat(parts).cpu()
    # fsum is exact, so that the order of ranks does not matter.
    return math.sqrt(math.fsum(gathered.tolist())) if bool(gathered.isfinite().all()) else math.nan
