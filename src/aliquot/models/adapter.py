"""LoRA adapters: add them to a model with peft, and merge them into the base model for an export.

peft adds two small matrices, A and B, to each adapted weight matrix. Only A and B are trained and saved.
During training the adapted matrix `X.weight` of the base model is named `X.base_layer.weight`. Its adapter consists of
`X.lora_A.default.weight` and `X.lora_B.default.weight`, which an adapter file stores as
`base_model.model.X.lora_A.weight` and `base_model.model.X.lora_B.weight`.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aliquot.config.adapter_section import ADAPTER_CONFIG, AdapterSection
from aliquot.core.decode import parse_json, read_small
from aliquot.core.errors import ConfigError, MissingToolError, ModelFilesError, WeightsFileError
from aliquot.core.small_files import with_home
from aliquot.models.initialize import Fills, record_added
from aliquot.models.lora_layers import expert_factors, fuse
from aliquot.models.model_files import with_ends
from aliquot.models.packed_weights import is_packed
from aliquot.models.source import local_directory, model_on_meta
from aliquot.models.stored_weights import (
    Published,
    StoredNames,
    StoredWeights,
    fingerprint,
    names_in_file_order,
    published_of,
)
from aliquot.models.structure import decoder_layers, fp32_weights
from aliquot.nn.experts.expert_modules import weight_names, weights_of
from aliquot.tensor_io.bytemap import ByteMap, Shape
from aliquot.tensor_io.code_sizes import is_compressible
from aliquot.tensor_io.parts import Part
from aliquot.tensor_io.range_io import RangeReader
from aliquot.tensor_io.transfer import read_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "model (hash of samples)"  # key of a checkpoint's state: the fingerprint of the base model
STEM = "adapter_model"  # the first part of the safetensors file names of an adapter, by peft's convention
_NAME = ".default"  # peft's name for the adapter in a model; names in files omit it
_PREFIX = "base_model.model."
_A, _B = f".lora_A{_NAME}.weight", f".lora_B{_NAME}.weight"
_MODEL_CONFIGS = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class Adapter:
    """The tensors and peft settings of an adapter that `adapt` has added to a model."""

    loads: tuple[Published, ...]  # weights of the base model, as its files store them
    saves: tuple[Published, ...]  # weights of the adapter, as its files store them
    settings: Any  # peft's LoraConfig

    def files(self, model_files: Mapping[str, bytes], path: str) -> dict[str, bytes]:
        """Return the files next to the adapter's weights: peft's configuration, and the tokenizer of the model.

        `path` is the directory or hub id of the model.
        """
        directory = with_home(path)
        self.settings.base_model_name_or_path = str(directory.resolve()) if directory.is_dir() else path
        with tempfile.TemporaryDirectory() as folder:
            self.settings.save_pretrained(folder)
            files = {ADAPTER_CONFIG: (Path(folder) / ADAPTER_CONFIG).read_bytes()}
        return files | {name: data for name, data in model_files.items() if name not in _MODEL_CONFIGS}


def adapt(model: PreTrainedModel, section: AdapterSection) -> tuple[Adapter, Fills]:
    """Add LoRA matrices to `model`, which is on the meta device, and freeze all other weights.

    Returns the adapter, and the operations that initialise its weights.

    Raises UserError if peft is not installed or does not find the layers to adapt.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer, ParamWrapper
        from transformers.pytorch_utils import Conv1D
    except ImportError as error:
        raise MissingToolError("adapter: LoRA needs peft: pip install 'aliquot[lora]'") from error
    # The settings of a saved adapter may also name layers of other models; its weights show which layers it adapts.
    if section.path is None:
        _check_names(model, section.target_modules)
    settings: Any = LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r,
        lora_alpha=section.alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout,
        target_modules=_linear_layers(model) if section.target_modules == "all-linear" else section.target_modules,
        target_parameters=_expert_weights(model) if section.experts else None,
        use_rslora=section.use_rslora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    fuse(settings, (module for module in model.modules() if weights_of(module) is not None))
    parameters = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    stored = published_of(model, parameters) or tuple(Published(name, shape, name, 0) for name, shape in parameters)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        fills = record_added(model, lambda: inject_adapter_in_model(settings, model))
    except ValueError as error:  # peft refuses unknown names and modules of unsupported types
        raise ConfigError(f"adapter.target_modules: {' '.join(str(error).split())}") from error
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module, Linear | ParamWrapper):
            raise ConfigError(
                f"adapter.target_modules: {name} is not a linear layer, and LoRA adapts only linear layers, and experts"
                " with adapter.experts"
            )
    if isinstance(model.get_output_embeddings(), LoraLayer):
        raise ConfigError(
            "adapter.target_modules names the output head, which has no adapter because it is computed with the loss:"
            " leave it out"
        )
    # peft made sets of these lists, and the order of a set varies.
    settings.target_modules = sorted(settings.target_modules)
    settings.target_parameters = sorted(settings.target_parameters or ()) or None
    settings.inference_mode = True
    new_names = {names[id(weight)]: name for name, weight in model.named_parameters() if id(weight) in names}
    loads = tuple(Published(tensor.name, tensor.shape, new_names[tensor.source], tensor.start) for tensor in stored)
    saves = saves_of([(name, tuple(model.get_parameter(name).shape)) for name in fills])
    return Adapter(loads, saves, settings), fills


def _check_names(model: PreTrainedModel, targets: str | Sequence[str]) -> None:
    """Raise ConfigError for a name in `targets` that matches no module; peft raises only if no name matches."""
    if isinstance(targets, str):
        return
    paths = [f".{path}" for path, _ in model.named_modules() if path]
    for name in targets:
        if not any(path.endswith(f".{name}") for path in paths):
            raise ConfigError(
                f"adapter.target_modules: {name!r} is the end of no layer's name; there are"
                f" {', '.join(_linear_layers(model))}"
            )


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the plain linear layers, without the output head.

    Subclasses of a linear layer with a different forward pass, such as the router of Llama 4, are excluded. Layers
    inside expert blocks, and layers that have the name of such a block, are excluded because peft would adapt the
    experts, too.
    """
    blocks = {path.split(".")[-2] for path, module in model.named_modules() if weights_of(module) is not None}
    head = model.get_output_embeddings()
    layers = [
        path
        for path, module in model.named_modules()
        if _is_plain_linear(module) and module is not head and blocks.isdisjoint(path.split("."))
    ]
    return sorted({path.rpartition(".")[2] for path in layers})


def _expert_weights(model: PreTrainedModel) -> list[str]:
    """Return the names of the weights of experts for peft's target_parameters, such as experts.down_proj.

    Raises ConfigError for a model without experts.
    """
    experts = {path.rpartition(".")[2]: module for path, module in model.named_modules() if weights_of(module)}
    if not experts:
        raise ConfigError(f"adapter.experts: {type(model).__name__} has no experts: leave it out")
    return [f"{path}.{name}" for path, module in experts.items() for name in weight_names(module)]


def _is_plain_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def compressible(model: PreTrainedModel, excluded: Sequence[str] = ()) -> frozenset[str]:
    """Return the names of frozen weights that adapter.base compresses: of linear layers and experts in decoder layers.

    Routers, which are linear layers beside experts, are not compressed. Neither are weights that several layers share,
    whose rows are no multiple of a block, or in the modules `excluded`. Raises ConfigError if no weight remains.
    """
    modules = dict(model.named_modules())
    blocks = {_block(path) for path, module in modules.items() if weights_of(module) is not None}
    chosen = {id(weight) for module in modules.values() for weight in weights_of(module) or ()}
    linear = (module for path, module in modules.items() if _is_plain_linear(module) and _block(path) not in blocks)
    chosen |= {id(module.weight) for module in linear}
    users = Counter(id(weight) for layer in decoder_layers(model) for weight in set(layer.parameters()))
    exact = fp32_weights(model)
    names = frozenset(
        name
        for name, weight in model.named_parameters()
        if id(weight) in chosen and users[id(weight)] == 1 and not weight.requires_grad
        if name not in exact and is_compressible(tuple(weight.shape))
        if not any(f".{module}." in f".{name.replace('.base_layer', '')}." for module in excluded)
    )
    if not names:
        raise ConfigError(
            f"adapter.base: {type(model).__name__} has no frozen layer with rows of a multiple of 64 elements, which"
            " compression needs: use adapter.base: bf16"
        )
    return names


def _block(path: str) -> str:
    """Return the path of the module that contains a module, which peft may have wrapped."""
    return path.replace(".base_layer", "").rpartition(".")[0]


def saves_of(tensors: Sequence[tuple[str, Shape]]) -> tuple[Published, ...]:
    """Map the weights of an adapter to the tensors of its files.

    `tensors` are (name in the model during training, shape).
    """
    return tuple(Published(_PREFIX + name.replace(_NAME, ""), shape, name, 0) for name, shape in tensors)


class MergedWeights:
    """Weights of a base model with an adapter merged in, under the names and shapes in the base model's files.

    Reading an adapted weight adds the scaled product of the adapter's two matrices to the weight, in fp32.
    """

    def __init__(
        self, adapter: StoredWeights, settings: bytes, reader: RangeReader, base: str | None, base_fingerprint: object
    ) -> None:
        """Open the base model and read the matrices of the adapter.

        Raises UserError if the base model does not have `base_fingerprint`, the fingerprint of the base model during
        training.

        Args:
            settings: peft's adapter_config.json, which names the base model.
            base: the directory or hub id of the base model, in place of the name in `settings`.
        """
        fields = parse_json(settings, ADAPTER_CONFIG)
        try:
            self._directory = local_directory(base or str(fields["base_model_name_or_path"]))
        except ModelFilesError as error:
            raise ModelFilesError(f"the base model of the adapter: {error}; --base names another directory") from None
        if fingerprint(self._directory) != base_fingerprint:
            raise WeightsFileError(
                "not the base weights that the adapter was trained on: name the right base model with --base",
                self._directory,
            )
        source = ByteMap.from_directory(self._directory)
        if any(is_packed(name, source.entries) for name in source.entries):
            raise WeightsFileError(
                "its weights are in 4 bits, into which no adapter can be merged: serve the adapter beside this model",
                self._directory,
            )
        self._base = StoredWeights(source, reader)
        self.tensors = names_in_file_order(source)
        model = model_on_meta(self._directory)
        names = StoredNames.from_model(model)
        exact = names.matched(source.entries, sorted(fp32_weights(model)))
        self.exact = frozenset(entry.name for entry in exact.values())  # weights that transformers keeps in fp32
        rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
        self._scaling = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
        tensors: dict[str, list[Published]] = {}
        for tensor in published_of(model, shapes) or ():
            tensors.setdefault(tensor.source, []).append(tensor)
        self._changes: dict[str, tuple[_Change, int]] = {}  # by name in the files; the element where a tensor begins
        parts = {part.name: part for part in adapter.parts()}
        for module in (name.removesuffix(_A) for name in parts if name.endswith(_A)):
            factors = (parts[module + end] for end in (_A, _B))
            a, b = (read_part(adapter, part).view(part.shape) for part in factors)
            weight, change = _change(model, module, a, b, bool(fields.get("fan_in_fan_out")))
            starts = {weight: 0}  # of the tensors in the files: the weight as transformers holds it, or as published
            if not (stored := names.matched(source.entries, [weight])):
                starts = {tensor.name: tensor.start for tensor in tensors.get(weight, ())}
                stored = names.matched(source.entries, [*starts])
            if not stored or len(stored) < len(starts):
                raise WeightsFileError(f"no weight {weight} here, which the adapter changes", self._directory)
            self._changes |= {stored[name].name: (change, start) for name, start in starts.items()}

    def files(self, adapter_files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the configuration files of the base model and the tokenizer files of the adapter."""
        configs = [self._directory / name for name in _MODEL_CONFIGS if (self._directory / name).is_file()]
        text_files = {name: data for name, data in adapter_files.items() if name != ADAPTER_CONFIG}
        return with_ends(text_files | {file.name: read_small(file) for file in configs})

    def parts(self) -> Sequence[Part]:
        return self._base.parts()

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._base.read(part, start, out)
        if part.name in self._changes:
            change, begin = self._changes[part.name]
            change.add(begin + start, out, self._scaling)


@dataclass(frozen=True)
class _Change:
    """The change of a weight [E, rows, columns], of which a weight outside of experts has E = 1."""

    left: Tensor  # [E, rows, r]
    right: Tensor  # [E, r, columns]

    def add(self, start: int, out: Tensor, scaling: float) -> None:
        """Add elements [start, start + numel) of the change, times `scaling`, to `out`."""
        rows, columns = self.left.shape[1], self.right.shape[2]
        while out.numel():
            matrix, within = divmod(start, rows * columns)
            first, last = within // columns, min(rows, -(-(within + out.numel()) // columns))
            values = torch.mm(self.left[matrix, first:last], self.right[matrix]).mul_(scaling).view(-1)
            values = values[within - first * columns :][: out.numel()]
            out[: len(values)] += values
            start, out = start + len(values), out[len(values) :]


def _change(model: nn.Module, module: str, a: Tensor, b: Tensor, is_transposed: bool) -> tuple[str, _Change]:
    """Return the name of the weight that an adapter of `module` changes, and its change.

    peft nests the adapters of the two weights of experts in the order of the weights, so that the outer adapter, whose
    module has the name of the experts, belongs to the second weight.
    """
    name = module.replace(".base_layer", "")
    experts = model.get_submodule(name)
    if weights_of(experts) is None:
        return f"{name}.weight", _Change(a.t()[None], b.t()[None]) if is_transposed else _Change(b[None], a[None])
    order = [weight for weight, _ in experts.named_parameters(recurse=False) if weight in weight_names(experts)]
    weight = order[0] if module.endswith(".base_layer") else order[1]
    a, b = expert_factors(a, b, len(getattr(experts, weight)))
    change = _Change(a.transpose(1, 2), b.transpose(1, 2)) if experts.is_transposed else _Change(b, a)
    return f"{name}.{weight}", change
