"""Memory for a model that was built on the meta device: buffers computed, parameters placed, tied names kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from aliquot.core.errors import UnsupportedModelError, UsageError

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


def freeze_buffers(model: nn.Module) -> None:
    """Make weights that learn nothing of the buffers that a checkpoint holds: sharded, saved and exported as weights.

    Routers have such biases. Raises UserError for one that is not floating point.
    """
    saved = model.state_dict().keys()
    for path, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            full_name = f"{path}.{name}".removeprefix(".")
            if full_name not in saved:
                continue
            if not buffer.is_floating_point():
                raise UnsupportedModelError(
                    f"{type(model).__name__}: buffer {full_name} holds {buffer.dtype}, not weights: not supported"
                )
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(buffer.to(torch.float32), requires_grad=False))


def initialize_module(model: nn.Module, module: nn.Module) -> None:
    """As transformers does: by the innermost of its models that holds `module`."""
    holders = [each for each in model.modules() if hasattr(each, "_init_weights") and module in set(each.modules())]
    cast("PreTrainedModel", holders[-1])._init_weights(module)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds beside the weights, by their names: a router's bias."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()}


def compute_buffers(model: nn.Module) -> None:
    """Give buffers on the meta device their values, by the initialisation that transformers' models bring.

    Those of `saved_buffers` get memory for what will be read. Raises UserError for another that a checkpoint would
    hold, and for one that the model does not compute.
    """
    replace_tensors(
        model,
        {name: torch.empty_like(b, device="cpu") for name, b in saved_buffers(model).items() if b.is_meta},
    )
    saved = model.state_dict().keys()
    owners = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{path}.{name}".removeprefix(".")
            if buffer.is_meta and full_name in saved:
                raise UsageError(f"buffer {full_name} of the model is on the meta device: give it a value first")
            if buffer.is_meta:
                owners[full_name] = module
    # A buffer may be filled by what holds its owner; what is inside goes first.
    inside = [(module, set(module.modules())) for module in model.modules()]
    above = [module for module, within in reversed(inside) if not within.isdisjoint(owners.values())]
    found = []
    for filling in (0, 1):  # what the model computes does not depend on what was there
        for full_name, module in owners.items():
            name = full_name.rpartition(".")[2]
            setattr(module, name, torch.full_like(getattr(module, name), filling, device="cpu"))
        if hasattr(model, "_init_weights"):
            with torch.no_grad():
                for module in above:
                    initialize_module(model, module)
        found.append({name: model.get_buffer(name).clone() for name in owners})
    unset = [name for name in owners if not torch.equal(*(values[name] for values in found))]
    if unset:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not compute its buffers {', '.join(unset)}: give them values first"
        )
