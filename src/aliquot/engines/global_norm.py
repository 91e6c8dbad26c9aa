"""Combine the sums of squares of all ranks to the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from aliquot.distributed.ranks import gather


def global_norm(squares: Sequence[float], device: torch.device) -> float:
    """Return the global gradient norm, the same on every rank; NaN if a gradient is not finite. Collective.

    `squares`: for each weight, the sum of squares of this rank's gradients; `device`: where the collective runs.
    """
    local = math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan
    if device.type == "cpu":
        totals = gather(local)
    else:  # one collective, and one wait for the GPU
        parts = torch.empty(dist.get_world_size(), dtype=torch.float64, device=device)
        dist.all_gather_into_tensor(parts, torch.tensor([local], dtype=torch.float64, device=device))
        totals = parts.tolist()
    # fsum is exact, so that the order of ranks does not matter.
    return math.sqrt(math.fsum(totals)) if all(map(math.isfinite, totals)) else math.nan
