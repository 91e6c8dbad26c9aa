"""Load weights into a model sharded by FSDP2, for users' own scripts: each rank reads only its own rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from aliquot.core.errors import UsageError
from aliquot.core.on_rank_0 import RankGroup, SingleRank
from aliquot.distributed.ranks import Members
from aliquot.models.load import LoadOptions, load_weights
from aliquot.models.stored_weights import StoredNames, published_of
from aliquot.models.structure import compute_buffers, decoder_layers, materialise, saved_buffers, tied_weights
from aliquot.models.untrusted_code import model_from_config
from aliquot.tensor_io.bytemap import Shape
from aliquot.tensor_io.parts import FlatParts, Part
from aliquot.tensor_io.transfer import Watch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel

# Prefixes that module wrappers (activation checkpointing, torch.compile, FSDP1) add to the names of weights.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def load_sharded(
    model: nn.Module | PretrainedConfig,
    directory: Path | str,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    watch: Watch | None = None,
) -> nn.Module:
    """Load the safetensors files in `directory` into a sharded model, and return the model. Collective.

    Every rank reads all persistent buffers; non-persistent buffers are computed. Tied weights stay tied. Without a
    process group, this process loads the whole model.

    Args:
        model: a model on the meta device, or the configuration of a causal language model. `fully_shard` must have
            sharded a given model, on any mesh. Each DTensor parameter has Shard(0) on at most one mesh dimension and
            Replicate on the others. Every rank reads parameters that are not DTensors as a whole. From a configuration,
            the model is built, and each decoder layer and the root module are sharded.
        mesh: the mesh for a model that is built from a configuration. It has one dimension, or two: (replicate, shard).
            The parameters are on its device type.
        dtype: the dtype of the parameters. Default: the dtype of the given model or of the configuration. The files may
            have any float dtype.
        watch: called with this rank's progress while the rank reads.

    Raises:
        UserError: on every rank, if files are missing or malformed, tensors do not fit the model, placements are not
            supported, or buffers cannot be computed. The message names the first tensors that do not fit.
    """
    built = model if isinstance(model, nn.Module) else _build(model, mesh, dtype)
    tied = tied_weights(built)
    device = _device(built, mesh)
    compute_buffers(built)
    materialise(built, device, device, dtype)
    ranks: RankGroup = Members(device) if dist.is_available() and dist.is_initialized() else SingleRank()
    aliases = {_plain(alias): _plain(name) for alias, name in tied.items()}
    tensors = tensors_of(built)
    published, names = published_of(built, tensors), StoredNames.from_model(built)
    load_weights(
        sharded_weights(built), Path(directory), tensors, aliases, ranks, LoadOptions(watch, published, names=names)
    )
    return built


class HeldWeights(FlatParts):
    """A part store (see tensor_io/parts.py) over this rank's weights, as flat tensors, for loading and export."""

    def __init__(self, held: Iterable[tuple[Part, Tensor]]) -> None:
        self._held = {part: values for part, values in held if part.numel}

    def parts(self) -> Sequence[Part]:
        return list(self._held)

    def flat(self, part: Part) -> Tensor:
        return self._held[part]


def sharded_weights(model: nn.Module) -> HeldWeights:
    """Return a part store over this rank's rows of the weights of a sharded model."""
    return HeldWeights(_held(name, weight) for name, weight in _stored(model))


def tensors_of(model: nn.Module) -> list[tuple[str, Shape]]:
    """Return (name, unsharded shape) of all parameters and persistent buffers; tied weights appear once."""
    return [(_plain(name), tuple(weight.shape)) for name, weight in _stored(model)]


def _stored(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *saved_buffers(model).items()]


def _build(config: PretrainedConfig, mesh: DeviceMesh | None, dtype: torch.dtype | None) -> PreTrainedModel:
    if mesh is None:
        raise UsageError("load_sharded of a configuration needs a mesh: init_device_mesh('cpu', (world_size,))")
    with torch.device("meta"):
        model = model_from_config(config, dtype=dtype or config.dtype or torch.float32)
    for module in [*decoder_layers(model), model]:
        fully_shard(module, mesh=mesh)
    return model


def _device(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    weight_mesh = next((weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)), mesh)
    if weight_mesh is None:
        return torch.device("cpu")
    return (
        torch.device("cuda", torch.cuda.current_device()) if weight_mesh.device_type == "cuda" else torch.device("cpu")
    )


def whole(name: str, values: Tensor) -> tuple[Part, Tensor]:
    """Return (part, flat values) of a tensor that every rank holds as a whole."""
    return Part(_plain(name), tuple(values.shape), "weight", 0, values.numel()), values.detach().view(-1)


def _held(name: str, weight: Tensor) -> tuple[Part, Tensor]:
    """Return (part, flat values) of this rank's rows of a weight."""
    if not isinstance(weight, DTensor):
        return whole(name, weight)
    shape, start = tuple(weight.shape), 0
    local = weight.to_local().detach()
    sharded = [dim for dim, placement in enumerate(weight.placements) if placement == Shard(0)]
    if len(sharded) > 1 or any(p not in (Shard(0), Replicate()) for p in weight.placements):
        raise UsageError(f"{name} is placed {weight.placements}: only one Shard(0) among Replicate can be loaded")
    for dim in sharded:
        rows = -(-shape[0] // weight.device_mesh.size(dim))  # ceil: the last ranks may have fewer or none
        first = min(weight.device_mesh.get_local_rank(dim) * rows, shape[0])
        start = first * (weight.numel() // max(shape[0], 1))
    return Part(_plain(name), shape, "weight", start, start + local.numel()), local.view(-1)


def _plain(name: str) -> str:
    """Return the name of a weight without the prefixes in `WRAPPERS`."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
