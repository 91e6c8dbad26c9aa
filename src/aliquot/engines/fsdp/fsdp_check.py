"""What the fsdp engine tries out before it trusts this machine with a run: the collectives that it will really use."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aliquot.core.errors import SelfTestError
from aliquot.engines.fsdp.fsdp_collectives import SharedAllGather, SharedReduceScatter, Stage

_NUMEL = 1000  # of each rank


def check_collectives(device: torch.device, stage: Stage | None) -> None:
    """Known numbers are summed and gathered through `stage`; None: by torch's own collectives. Collective.

    Raises TrainingError. torch <= 2.8 on gloo summed where it should average (pytorch#162338).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(world_size, dtype=torch.float32, device=device).repeat_interleave(_NUMEL)
    own = torch.empty(_NUMEL, device=device)
    ranks_sum = world_size * (world_size + 1) / 2
    given = whole + rank + 1  # slice i, for rank i, holds i + rank + 1
    gathered = torch.empty_like(whole)
    if stage is None:
        dist.reduce_scatter_single(own, given)
        dist.all_gather_single(gathered, torch.full_like(own, rank))
    else:
        group = dist.group.WORLD
        assert group is not None
        SharedReduceScatter(stage)(output_tensor=own, input_tensor=given, group=group, op=dist.ReduceOp.SUM)
        SharedAllGather(stage)(output_tensor=gathered, input_tensor=torch.full_like(own, rank), group=group)
    _expect("reduce-scatter", own, torch.full_like(own, world_size * rank + ranks_sum))
    _expect("all-gather", gathered, whole)


def _expect(what: str, found: Tensor, expected: Tensor) -> None:
    wrong = (found != expected).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise SelfTestError(
            f"a {what} of known numbers gave {found[at].item()} instead of {expected[at].item()}:"
            " broken torch or memory?"
        )
