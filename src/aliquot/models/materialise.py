"""Memory for a model that was built on the meta device: buffers computed, parameters placed, tied names kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from aliquot.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tied_weights(model: nn.Module) -> dict[str, str]:
    """Further name of a weight -> the first one."""
    first: dict[Tensor, str] = {}
    names = [(name, first.setdefault(weight, name)) for name, weight in model.named_parameters(remove_duplicate=False)]
    return {name: kept for name, kept in names if name != kept}


def replace_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put each parameter or buffer of `tensors` in the place of the one that the model has under this name."""
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, tensor)


def materialise(
    model: nn.Module, device: torch.device, buffers_on: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Allocate every parameter on `device`, not filled, as `dtype` if given; buffers keep values and dtype."""
    tied = tied_weights(model)
    buffers = {name: buffer.to(buffers_on, copy=True) for name, buffer in model.named_buffers()}
    model.to(dtype).to_empty(device=device)
    # Both calls also changed the buffers and gave each name of a tied weight a parameter of its own.
    replace_tensors(model, {**buffers, **{alias: model.get_parameter(name) for alias, name in tied.items()}})


def compute_buffers(model: nn.Module) -> None:
    """Give buffers on the meta device their values, by the initialisation that transformers' models bring.

    Raises UserError for a buffer that a checkpoint would hold or that the model does not compute.
    """
    saved = model.state_dict().keys()
    owners = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{path}.{name}".removeprefix(".")
            if buffer.is_meta and (full_name in saved or not buffer.is_floating_point()):
                raise UsageError(f"buffer {full_name} of the model is on the meta device: give it a value first")
            if buffer.is_meta:
                owners[full_name] = module
                setattr(module, name, torch.full_like(buffer, float("nan"), device="cpu"))
    if hasattr(model, "_init_weights"):
        with torch.no_grad():
            for module in dict.fromkeys(owners.values()):
                cast("PreTrainedModel", model)._init_weights(module)
    unset = [name for name in owners if bool(model.get_buffer(name).isnan().any())]
    if unset:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not compute its buffers {', '.join(unset)}: give them values first"
        )
