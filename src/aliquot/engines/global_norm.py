"""The global gradient norm, the same number on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist


def global_norm(squares: Sequence[float], device: torch.device) -> float:
    """The norm of all ranks' gradients, of which `squares` are this rank's sums of squares, one a weight. Collective.

    Every rank adds the same numbers, exactly; `device` is where collectives take them from. nan where any gradient is
    not finite.
    """
    own = torch.tensor(list(squares), dtype=torch.float64, device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    every = torch.cat(parts).cpu()
    return math.sqrt(math.fsum(every.tolist())) if bool(every.isfinite().all()) else math.nan
