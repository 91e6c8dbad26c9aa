"""Which kind of device a run computes on."""

from __future__ import annotations

from typing import Literal

from aliquot.errors import DeviceError


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The device of `launch.device`; auto takes a GPU where torch sees one. Raises UserError for a GPU that is not."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise DeviceError("launch.device is cuda, but torch sees no GPU here: set launch.device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return "cuda"
