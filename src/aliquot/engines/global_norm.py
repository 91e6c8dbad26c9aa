"""Combine the sums of squares of all ranks to the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist


def global_norm(squares: Sequence[float], device: torch.device) -> float:
    """Return the global gradient norm, the same on every rank; NaN if a gradient is not finite. Collective.

    `squares`: for each weight, the sum of squares of this rank's gradients; `device`: where the collective runs.
    """
    local = torch.tensor(list(squares), dtype=torch.float64, device=device)
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    gathered = torch.cat(parts).cpu()
    # fsum is exact, so that the order of ranks does not matter.
    return math.sqrt(math.fsum(gathered.tolist())) if bool(gathered.isfinite().all()) else math.nan
