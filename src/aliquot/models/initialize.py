"""Sharded initialisation: the same weights whatever the world size, each rank drawing only what it needs.

transformers' own `_init_weights` runs once on the meta device while a dispatch mode writes down which in-place
operation it makes on which parameter. Those operations are then replayed on fixed blocks of rows, each block with a
generator seeded by (seed, name, block), so that any rank can draw any block alone. What it computes otherwise (the time
steps of state-space layers, what torch leaves as it is on the meta device) is had by running it on the whole layer,
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
from aliquot.models.materialise import compute_buffers, freeze_buffers, initialize_module
from aliquot.models.narrow import built, narrow
from aliquot.models.remote_code import without_code
from aliquot.models.structure import decoder_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from aliquot.tensor_io.parts import PartStore

# A block holds whole rows and about this many values: 4 MiB in fp32.
BLOCK_NUMEL = 1 << 20
# These overwrite whatever was there, so that nothing recorded before them needs replaying.
OVERWRITING = ("normal_", "uniform_", "fill_", "zero_")
# torch's own initialisations that do nothing to meta tensors: not a trace of them would be recorded.
_SKIPS_META = ("trunc_normal_", "orthogonal_", "dirac_", "sparse_")


@dataclass(frozen=True)
class Fill:
    """One in-place operation with plain arguments on elements [start, stop) of a weight."""

    operation: str
    arguments: tuple[Any, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class OfLayer:
    """A weight that only running `_init_weights` on all of a layer gives."""

    config: PretrainedConfig
    layer: str  # path of the module
    name: str  # of the weight in it
    reason: str

    def whole(self, seed: int) -> Tensor:
        """Flat fp32 values. Raises UnsupportedModelError where they are not given so either."""
        kind: Any = type(self.config)
        values = _layer_weights(kind, json.dumps(self.config.to_dict(), default=str), self.layer, seed)
        found = values[self.name]
        if not bool(found.isnan().any()):
            return found
        # Given by the constructor alone: the narrow copy has been constructed for real.
        suffix = f".{self.name}" if self.layer else self.name
        values = built(narrow(self.config), "eager").state_dict()
        constants = {float(value) for name in values if name.endswith(suffix) for value in values[name].unique()}
        if len(constants) != 1:
            raise UnsupportedModelError(f"{self.layer}.{self.name} is not initialised by transformers ({self.reason})")
        return torch.full_like(found, constants.pop())


Fills = Mapping[str, "tuple[Fill, ...] | OfLayer"]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every in-place operation on a meta tensor by the storage it changes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[tuple[Tensor, Fill | str]] = []  # a str: why it cannot be replayed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        operation = schema.name.removeprefix("aten::")
        writes = schema.arguments and schema.arguments[0].alias_info and schema.arguments[0].alias_info.is_write
        recorded = writes and args[0].is_meta
        # What only puts other values into a tensor changes nothing of one that has none: torch takes long to find that.
        result = args[0] if recorded and operation in OVERWRITING else func(*args, **(kwargs or {}))
        if recorded:
            target = args[0]
            arguments = tuple(args[1:])
            if not target.is_contiguous():
                self.written.append((target, f"{operation} on a strided view"))
            elif any(isinstance(argument, torch.Tensor) for argument in arguments):
                self.written.append((target, f"{operation} of computed values"))
            else:
                start = int(target.storage_offset())
                fill = Fill(operation, arguments, start, start + target.numel())
                self.written.append((target, fill))
        return result


def record(model: PreTrainedModel) -> Fills:
    """Run the model's own weight initialisation on meta parameters; fill its non-persistent buffers for real.

    Returns the fills of every parameter by name.
    """
    owned: set[Tensor] = set()
    for module in model.modules():
        # transformers marks modules as done while it builds them; this pass is the one that counts. A head that is
        # tied to the embedding stays marked: transformers ties after it initialises, and the embedding's values win.
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

    fills, otherwise = _replayable(dict(model.named_parameters()), recorder)
    otherwise |= {name: refused or "nothing fills it" for name, found in fills.items() if not found}
    if skipped := _skipped(model):
        otherwise |= {name: f"{skipped} does nothing to meta tensors" for name in fills}
    repeated = set(decoder_layers(model))
    layers = [path for path, module in model.named_modules() if module in repeated]
    return {
        name: _of_layer(model, name, layers, otherwise[name]) if name in otherwise else tuple(found)
        for name, found in fills.items()
    }


def _skipped(model: PreTrainedModel) -> str | None:
    """The first of `_SKIPS_META` that the code by which a model is initialised names."""
    models = [module for module in model.modules() if hasattr(module, "_init_weights")]
    code = "".join(inspect.getsource(method) for method in {type(each)._init_weights for each in models})
    return next((name for name in _SKIPS_META if f"init.{name}(" in code), None)


def record_added(model: nn.Module, add: Callable[[], object]) -> Fills:
    """Have `add` add modules, initialised by itself, to a model on the meta device; the fills of their parameters.

    Raises UnsupportedModelError for what cannot be drawn in blocks.
    """
    before = set(model.parameters())
    with _Recorder() as recorder, torch.device("meta"):
        add()
    added = {name: parameter for name, parameter in model.named_parameters() if parameter not in before}
    fills, otherwise = _replayable(added, recorder)
    for name, found in fills.items():
        if name in otherwise or not found:
            raise UnsupportedModelError(f"{name} is not initialised ({otherwise.get(name, 'nothing fills it')})")
    return {name: tuple(found) for name, found in fills.items()}


def _replayable(
    parameters: Mapping[str, nn.Parameter], recorder: _Recorder
) -> tuple[dict[str, list[Fill]], dict[str, str]]:
    """Of each the operations that fill it, and why those of some cannot be replayed."""
    name_of_storage = {_storage(parameter): name for name, parameter in parameters.items()}
    fills: dict[str, list[Fill]] = {name: [] for name in parameters}
    otherwise: dict[str, str] = {}
    for target, fill in recorder.written:
        name = name_of_storage.get(_storage(target))
        if name is None:
            continue
        if isinstance(fill, str):
            otherwise[name] = fill
            continue
        numel = parameters[name].numel()
        if fill.operation in OVERWRITING and (fill.start, fill.stop) == (0, numel):
            fills[name].clear()
        fills[name].append(fill)
    return fills, otherwise


def _of_layer(model: PreTrainedModel, name: str, layers: list[str], reason: str) -> OfLayer:
    layer = next((path for path in layers if name.startswith(path + ".")), name.rpartition(".")[0])
    return OfLayer(model.config, layer, name.removeprefix(layer + "."), reason)


@lru_cache(maxsize=1)  # a rank asks for all weights of a layer before it asks for those of the next
def _layer_weights(kind: Any, config: str, path: str, seed: int) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = without_code(AutoModelForCausalLM.from_config)(kind.from_dict(json.loads(config)), dtype=torch.float32)
    freeze_buffers(model)
    layer = model.get_submodule(path).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little"))
        for parameter in layer.parameters():
            parameter.fill_(math.nan)
        # What is inside before what it is in, as transformers does; the rest of what it is in stays on the meta device.
        around = [model.get_submodule(path.rsplit(".", count)[0]) for count in range(1, path.count(".") + 1)]
        for module in (*reversed(list(layer.modules())), *around, *([model] if path else [])):
            vars(module).pop("_is_hf_initialized", None)
            initialize_module(model, module)
    return {name: parameter.detach().float().flatten() for name, parameter in layer.named_parameters()}


def initialize(store: PartStore, fills: Fills, seed: int) -> None:
    """Fill those weight parts that `store` owns and `fills` knows; moments are left alone."""
    for part in store.parts():
        if part.kind != "weight" or part.name not in fills:
            continue
        found = fills[part.name]
        if isinstance(found, OfLayer):
            store.write(part, part.start, found.whole(seed)[part.start : part.stop])
            continue
        for index, start, stop in blocks(part.shape, part.start, part.stop):
            values = draw(found, seed, part.name, index, start, stop)
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
        view = values[first - start : last - start]
        if fill.operation in ("normal_", "uniform_"):
            getattr(view, fill.operation)(*fill.arguments, generator=generator)
        else:
            getattr(view, fill.operation)(*fill.arguments)
    return values


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
