"""Sharded initialisation: the same weights at any world size; each rank draws only its own blocks.

The `_init_weights` of transformers runs once on the meta device, while a dispatch mode records its in-place operations
on parameters. These operations are replayed on fixed blocks of rows, each block with a generator seeded by (seed, name,
block), so that any rank can draw any block alone. Values that cannot be replayed (time steps of state-space layers,
functions that ignore meta tensors) come from running `_init_weights` on the whole layer, seeded by (seed, layer).
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
# These operations overwrite all values, so that earlier operations need no replay.
OVERWRITING = ("normal_", "uniform_", "fill_", "zero_")
# Initialisations of torch that ignore meta tensors, so that no record of them is possible.
_SKIPS_META = ("trunc_normal_", "orthogonal_", "dirac_", "sparse_")


@dataclass(frozen=True)
class Fill:
    """One in-place operation with plain arguments on elements [start, stop) of a weight."""

    operation: str
    arguments: tuple[Any, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class LayerFill:
    """A weight whose values come from running `_init_weights` on the whole layer."""

    config: PretrainedConfig
    layer: str  # path of the module
    name: str  # name of the weight in the layer
    reason: str

    def whole(self, seed: int) -> Tensor:
        """Return flat fp32 values. Raises UnsupportedModelError if the layer leaves the weight uninitialised."""
        kind: Any = type(self.config)
        fields = json.dumps(self.config.to_dict(), default=str)
        layer_values = _layer_weights(kind, fields, self.layer, seed)[self.name]
        if not bool(layer_values.isnan().any()):
            return layer_values
        # Some values come from the constructor alone: a narrow copy of the model shows them.
        suffix = f".{self.name}" if self.layer else self.name
        values = built(narrow(self.config), "eager").state_dict()
        constants = {float(value) for name in values if name.endswith(suffix) for value in values[name].unique()}
        if len(constants) != 1:
            raise UnsupportedModelError(f"{self.layer}.{self.name} is not initialised by transformers ({self.reason})")
        return torch.full_like(layer_values, constants.pop())


Fills = Mapping[str, "tuple[Fill, ...] | LayerFill"]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every in-place operation on a meta tensor with the storage that it changes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[tuple[Tensor, Fill | str]] = []  # a str is the reason why the operation cannot be replayed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        operation = schema.name.removeprefix("aten::")
        writes = schema.arguments and schema.arguments[0].alias_info and schema.arguments[0].alias_info.is_write
        recorded = writes and args[0].is_meta
        # Overwriting a meta tensor changes nothing, and torch needs long for it.
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
    """Run the model's own initialisation on meta parameters and return the fills of each parameter by name.

    Its non-persistent buffers are filled for real.
    """
    owned: set[Tensor] = set()
    for module in model.modules():
        # transformers marks modules as initialised while it builds them; this pass must initialise them again. A head
        # tied to the embedding stays marked: transformers ties after initialising, so that the embedding's values win.
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
    """Return the first function of `_SKIPS_META` that the initialisation code of a model calls."""
    methods = {type(module)._init_weights for module in model.modules() if hasattr(module, "_init_weights")}
    code = "".join(map(inspect.getsource, methods))
    return next((name for name in _SKIPS_META if f"init.{name}(" in code), None)


def record_added(model: nn.Module, add: Callable[[], object]) -> Fills:
    """Call `add`, which adds initialised modules to a model on the meta device; return the fills of their parameters.

    Raises UnsupportedModelError for parameters that cannot be drawn in blocks.
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
        if name is None:
            continue
        if isinstance(fill, str):
            reasons[name] = fill
            continue
        if fill.operation in OVERWRITING and (fill.start, fill.stop) == (0, parameters[name].numel()):
            fills[name].clear()
        fills[name].append(fill)
    return fills, reasons


def _layer_fill(model: PreTrainedModel, name: str, layers: list[str], reason: str) -> LayerFill:
    layer = next((path for path in layers if name.startswith(path + ".")), name.rpartition(".")[0])
    return LayerFill(model.config, layer, name.removeprefix(layer + "."), reason)


@lru_cache(maxsize=1)  # a rank needs all weights of a layer before weights of the next layer
def _layer_weights(kind: Any, config: str, path: str, seed: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = model_from_config(kind.from_dict(json.loads(config)), dtype=torch.float32)
    freeze_buffers(model)
    layer = model.get_submodule(path).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little"))
        for parameter in layer.parameters():
            parameter.fill_(math.nan)
        # Inner modules come before outer ones, as in transformers; other parts of outer ones stay on the meta device.
        around = [model.get_submodule(path.rsplit(".", count)[0]) for count in range(1, path.count(".") + 1)]
        for module in (*reversed(list(layer.modules())), *around, *([model] if path else [])):
            vars(module).pop("_is_hf_initialized", None)
            initialize_module(model, module)
    return {name: parameter.detach().float().flatten() for name, parameter in layer.named_parameters()}


def initialize(store: PartStore, fills: Fills, seed: int) -> None:
    """Fill the weight parts of `store` that `fills` describes; moments stay untouched."""
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
    """(index, start, stop) of the blocks of whole rows that meet elements [start, stop) of a tensor of `shape`."""
    numel = torch.Size(shape).numel()
    row = numel // shape[0] if shape and shape[0] else 1
    size = max(1, BLOCK_NUMEL // max(row, 1)) * max(row, 1)
    for index in range(start // size, -(-stop // size)):
        yield index, index * size, min((index + 1) * size, numel)


def draw(fills: tuple[Fill, ...], seed: int, name: str, index: int, start: int, stop: int) -> Tensor:
    """Elements [start, stop), one whole block of the weight `name`, as flat fp32 on CPU."""
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
