"""Which kind of device a run computes on."""

from __future__ import annotations

from typing import Literal

from aliquot.core.errors import DeviceError, LaunchError


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The device of `launch.device`; auto takes a GPU where torch sees one. Raises UserError for a GPU that is not."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise DeviceError("launch.device is cuda, but torch sees no GPU here: set launch.device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return "cuda"


def check_gpus(local_ranks: int) -> None:
    """Raises UserError where several ranks would have to share a GPU, which nccl refuses."""
    import torch

    gpus = torch.cuda.device_count()
    if local_ranks > gpus:
        raise LaunchError(
            f"{local_ranks} ranks on this machine, which has {gpus} GPU{'' if gpus == 1 else 's'}: each needs its own;"
            f" set launch.ranks={gpus}, or launch.device=cpu"
        )
