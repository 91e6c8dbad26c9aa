"""Find the layers, tied weights and buffers of a transformers model, and allocate memory for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from aliquot.core.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of the model, in order.

    These are the modules in a ModuleList whose class the model names in `_no_split_modules`. Without such modules, they
    are the modules of the longest ModuleList with modules of a single class.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    named = [layer for layers in lists for layer in layers if type(layer).__name__ in names]
    alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    return named or max(alike, key=len, default=[])


def fp32_weights(model: nn.Module) -> frozenset[str]:
    """Return the names of weights that transformers keeps in fp32 in a bf16 model, such as biases of MoE routers."""
    parts: set[str] = getattr(model, "_keep_in_fp32_modules_strict", None) or set()
    return frozenset(name for name in model.state_dict() if any(part in name for part in parts))


def tied_weights(model: nn.Module) -> dict[str, str]:
    """Return the tied weights of the model: each further name of a weight -> the first name of the weight."""
    first: dict[Tensor, str] = {}
    names = [(name, first.setdefault(weight, name)) for name, weight in model.named_parameters(remove_duplicate=False)]
    return {name: first_name for name, first_name in names if name != first_name}


def replace_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace the parameters and buffers of the model that `tensors` names by the tensors given there."""
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, tensor)


def materialise(
    model: nn.Module, device: torch.device, buffers_on: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Allocate every parameter on `device`, uninitialised; move buffers to `buffers_on` with their values and dtypes.

    `dtype` is the dtype of all parameters; None: parameters keep their dtypes.
    """
    tied = tied_weights(model)
    buffers = {name: buffer.to(buffers_on, copy=True) for name, buffer in model.named_buffers()}
    model.to(dtype).to_empty(device=device)
    # Both calls also changed the buffers and replaced each tied weight by separate parameters: restore both.
    replace_tensors(model, {**buffers, **{alias: model.get_parameter(name) for alias, name in tied.items()}})


def set_training(model: nn.Module, training: bool) -> None:
    """Switch a model to training or evaluation, unless it is switched already: `train()` visits every module."""
    if model.training != training:
        model.train(training)


def freeze_buffers(model: nn.Module) -> None:
    """Turn persistent buffers into frozen weights, so that they are sharded, saved and exported.

    For example, the biases of MoE routers are persistent buffers. Raises UserError for a persistent buffer that is not
    floating point.
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
    """Initialise `module` as transformers does: by `_init_weights` of the innermost model that contains `module`."""
    models = [part for part in model.modules() if hasattr(part, "_init_weights") and module in set(part.modules())]
    cast("PreTrainedModel", models[-1])._init_weights(module)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent floating-point buffers by name, such as the biases of MoE routers."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()}


@torch.no_grad()
def compute_buffers(model: nn.Module) -> None:
    """Give buffers that are on the meta device real values on the CPU, by the initialisation code of the model.

    The buffers of `saved_buffers` get uninitialised memory, because loading fills them. Raises UserError for any other
    persistent buffer, and for a buffer that the initialisation code does not set.
    """
    on_meta = {name: buffer for name, buffer in saved_buffers(model).items() if buffer.is_meta}
    replace_tensors(model, {name: torch.empty_like(buffer, device="cpu") for name, buffer in on_meta.items()})
    saved = model.state_dict().keys()
    computed = [name for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta]
    for name in computed:
        if name in saved:
            raise UsageError(f"buffer {name} of the model is on the meta device: give it a value first")
    owners = {model.get_submodule(name.rpartition(".")[0]) for name in computed}
    # An outer module may set the buffers of an inner module, so inner modules are initialised first.
    submodules = [(module, set(module.modules())) for module in model.modules()]
    owning = [module for module, within in reversed(submodules) if not within.isdisjoint(owners)]
    results = []
    for filling in (0, 1):  # a buffer that keeps the filling in part or as a whole is not computed by the model
        filled = {name: torch.full_like(model.get_buffer(name), filling, device="cpu") for name in computed}
        replace_tensors(model, filled)
        if hasattr(model, "_init_weights"):
            for module in owning:
                initialize_module(model, module)
        results.append({name: model.get_buffer(name).clone() for name in computed})
    unset = [name for name in computed if not torch.equal(*(values[name] for values in results))]
    if unset:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not compute its buffers {', '.join(unset)}: give them values first"
        )
