"""Initialise sharded weights: each rank draws only its shards, and the weights do not depend on the world size.

`_init_weights` of transformers runs once on the meta device, while a dispatch mode records the in-place operations on
parameters. Each rank then replays the operations on fixed blocks of rows. The random generator of a block is seeded by
(seed, weight name, block index), so that a rank can draw any block alone. Some weights cannot be replayed: time steps
of state-space layers, and functions that ignore meta tensors. For these, `_init_weights` runs on the whole layer,
seeded by (seed, layer).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from aliquot.core.errors import UnsupportedModelError
from aliquot.models.narrow import built, narrow
from aliquot.models.structure import compute_buffers, decoder_layers, freeze_buffers, initialize_module
from aliquot.models.untrusted_code import model_from_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from aliquot.tensor_io.parts import PartStore

# A block holds whole rows and about this many values: 4 MiB in fp32.
BLOCK_NUMEL = 1 << 20
# These operations overwrite all values, so that operations before them need no replay.
OVERWRITING = ("normal_", "uniform_", "fill_", "zero_")
# Initialisation functions of torch that ignore meta tensors, so that their operations cannot be recorded.
_SKIPS_META = ("trunc_normal_", "orthogonal_", "dirac_", "sparse_")


@dataclass(frozen=True)
class Fill:
    """One recorded in-place operation, which initialises elements [start, stop) of a weight."""

    operation: str
    arguments: tuple[Any, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class LayerFill:
    """A weight that `_init_weights` must initialise together with the whole layer of the weight."""

    config: PretrainedConfig
    layer: str  # path of the module
    name: str  # name of the weight in the layer
    reason: str

    def whole(self, seed: int) -> Tensor:
        """Return the values of the whole weight, flat and in fp32.

        Raises UnsupportedModelError if transformers does not initialise the weight.
        """
        kind: Any = type(self.config)
        fields = json.dumps(self.config.to_dict(), default=str)
        layer_values = _layer_weights(kind, fields, self.layer, seed)[self.name]
        if not bool(layer_values.isnan().any()):
            return layer_values
        # The constructor of the layer sets some weights to a constant. A narrow copy of the model shows the constant.
        suffix = f".{self.name}" if self.layer else self.name
        values = built(narrow(self.config), "eager").state_dict()
        constants = {float(value) for name in values if name.endswith(suffix) for value in values[name].unique()}
        if len(constants) != 1:
            raise UnsupportedModelError(f"{self.layer}.{self.name} is not initialised by transformers ({self.reason})")
        return torch.full_like(layer_values, constants.pop())


Fills = Mapping[str, "tuple[Fill, ...] | LayerFill"]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every in-place operation on a meta tensor, together with the tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[tuple[Tensor, Fill | str]] = []  # a str is the reason why the operation cannot be replayed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        operation = schema.name.removeprefix("aten::")
        writes = schema.arguments and schema.arguments[0].alias_info and schema.arguments[0].alias_info.is_write
        recorded = writes and args[0].is_meta
        # Overwriting a meta tensor has no effect and is slow in torch, so it is skipped.
        result = args[0] if recorded and operation in OVERWRITING else func(*args, **(kwargs or {}))
        if recorded:
            target, arguments = args[0], tuple(args[1:])
            start = int(target.storage_offset())
            fill: Fill | str = Fill(operation, arguments, start, start + target.numel())
            if not target.is_contiguous():
                fill = f"{operation} on a strided view"
            elif any(isinstance(argument, torch.Tensor) for argument in arguments):
                fill = f"{operation} of computed values"
            self.written.append((target, fill))
        return result


def record(model: PreTrainedModel) -> Fills:
    """Run the initialisation of a model on the meta device; return for each parameter the operations that fill it.

    The non-persistent buffers of the model get real values on the CPU.
    """
    owned: set[Tensor] = set()
    for module in model.modules():
        # transformers marks modules as initialised while it builds them; without the mark, initialize_weights below
        # initialises a module again. A head tied to the embedding keeps its mark, because transformers ties weights
        # after initialising them: the values of the embedding must win.
        weights = set(module.parameters(recurse=False))
        if weights and weights <= owned:
            vars(module)["_is_hf_initialized"] = True
        else:
            vars(module).pop("_is_hf_initialized", None)
        owned |= weights
    compute_buffers(model)
    refused = ""
    with _Recorder() as recorder, torch.no_grad():
        try:
            model.initialize_weights()
        except RuntimeError as error:  # meta tensors have no values to compute with
            refused = f"its initialisation needs values: {error}"

    fills, layer_reasons = _replayable(dict(model.named_parameters()), recorder)
    layer_reasons |= {name: refused or "nothing fills it" for name, operations in fills.items() if not operations}
    if skipped := _skipped(model):
        layer_reasons |= {name: f"{skipped} does nothing to meta tensors" for name in fills}
    repeated = set(decoder_layers(model))
    layers = [path for path, module in model.named_modules() if module in repeated]
    return {
        name: _layer_fill(model, name, layers, layer_reasons[name]) if name in layer_reasons else tuple(operations)
        for name, operations in fills.items()
    }


def _skipped(model: PreTrainedModel) -> str | None:
    """Return the first function of `_SKIPS_META` that the initialisation code of `model` calls, or None."""
    methods = {type(module)._init_weights for module in model.modules() if hasattr(module, "_init_weights")}
    code = "".join(map(inspect.getsource, methods))
    return next((name for name in _SKIPS_META if f"init.{name}(" in code), None)


def record_added(model: nn.Module, add: Callable[[], object]) -> Fills:
    """Call `add`, which adds modules to a model on the meta device; return the operations that fill their parameters.

    Raises UnsupportedModelError for a parameter whose initialisation cannot be replayed in blocks.
    """
    before = set(model.parameters())
    with _Recorder() as recorder, torch.device("meta"):
        add()
    added = {name: parameter for name, parameter in model.named_parameters() if parameter not in before}
    fills, reasons = _replayable(added, recorder)
    for name, operations in fills.items():
        if name in reasons or not operations:
            raise UnsupportedModelError(f"{name} is not initialised ({reasons.get(name, 'nothing fills it')})")
    return {name: tuple(operations) for name, operations in fills.items()}


def _replayable(
    parameters: Mapping[str, nn.Parameter], recorder: _Recorder
) -> tuple[dict[str, list[Fill]], dict[str, str]]:
    """Return the operations that fill each parameter, and reasons why some parameters cannot be replayed."""
    name_of_storage = {_storage(parameter): name for name, parameter in parameters.items()}
    fills: dict[str, list[Fill]] = {name: [] for name in parameters}
    reasons: dict[str, str] = {}
    for target, fill in recorder.written:
        name = name_of_storage.get(_storage(target))
        if name is not None and isinstance(fill, str):
            reasons[name] = fill
        elif name is not None and isinstance(fill, Fill):
            if fill.operation in OVERWRITING and (fill.start, fill.stop) == (0, parameters[name].numel()):
                fills[name].clear()
            fills[name].append(fill)
    return fills, reasons


def _layer_fill(model: PreTrainedModel, name: str, layers: list[str], reason: str) -> LayerFill:
    layer = next((path for path in layers if name.startswith(path + ".")), name.rpartition(".")[0])
    return LayerFill(model.config, layer, name.removeprefix(layer + "."), reason)


@lru_cache(maxsize=1)  # one entry suffices: a rank asks for all weights of a layer before the weights of another layer
def _layer_weights(kind: Any, config: str, path: str, seed: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = model_from_config(kind.from_dict(json.loads(config)), dtype=torch.float32)
    freeze_buffers(model)
    layer = model.get_submodule(path).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little"))
        for parameter in layer.parameters():
            parameter.fill_(math.nan)
        # As in transformers, inner modules come before outer modules. The modules around the layer stay on the meta
        # device, except for the layer itself.
        around = [model.get_submodule(path.rsplit(".", count)[0]) for count in range(1, path.count(".") + 1)]
        for module in (*reversed(list(layer.modules())), *around, *([model] if path else [])):
            vars(module).pop("_is_hf_initialized", None)
            initialize_module(model, module)
    return {name: parameter.detach().float().flatten() for name, parameter in layer.named_parameters()}


def initialize(store: PartStore, fills: Fills, seed: int) -> None:
    """Initialise the weights of `store` that `fills` describes; moments of the optimizer are not changed."""
    for part in store.parts():
        if part.kind != "weight" or part.name not in fills:
            continue
        weight_fills = fills[part.name]
        if isinstance(weight_fills, LayerFill):
            store.write(part, part.start, weight_fills.whole(seed)[part.start : part.stop])
            continue
        for index, start, stop in blocks(part.shape, part.start, part.stop):
            values = draw(weight_fills, seed, part.name, index, start, stop)
            first, last = max(start, part.start), min(stop, part.stop)
            store.write(part, first, values[first - start : last - start])


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks of rows of a tensor of `shape` that overlap elements [start, stop).

    A block is (index, first element, end element).
    """
    numel = torch.Size(shape).numel()
    row = numel // shape[0] if shape and shape[0] else 1
    size = max(1, BLOCK_NUMEL // max(row, 1)) * max(row, 1)
    for index in range(start // size, -(-stop // size)):
        yield index, index * size, min((index + 1) * size, numel)


def draw(fills: tuple[Fill, ...], seed: int, name: str, index: int, start: int, stop: int) -> Tensor:
    """Draw block `index` of the weight `name`, elements [start, stop), as flat fp32 on the CPU."""
    digest = hashlib.sha256(f"{seed}:{name}:{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    values = torch.zeros(stop - start)
    for fill in fills:
        first, last = max(fill.start, start), min(fill.stop, stop)
        if first >= last:
            continue
        draws = {"generator": generator} if fill.operation in ("normal_", "uniform_") else {}
        getattr(values[first - start : last - start], fill.operation)(*fill.arguments, **draws)
    return values


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
