"""LoRA: peft adds two small matrices to each adapted matrix; only these learn, are saved and exported.

In a run an adapted matrix is `X.base_layer.weight` next to `X.lora_A.default.weight` and `X.lora_B.default.weight`;
in the files of the model it is `X.weight`, in the files of an adapter `base_model.model.X.lora_A.weight`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from aliquot.config.adapter_section import ADAPTER_CONFIG, AdapterSection
from aliquot.core.errors import ConfigError, MissingToolError
from aliquot.core.paths import with_home
from aliquot.models.initialize import Fills, record_added
from aliquot.models.linear_layers import fuse
from aliquot.models.published import Published, published_of
from aliquot.nn.experts.expert_modules import weights_of
from aliquot.tensor_io.bytemap import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "model (hash of samples)"  # key of a checkpoint's state: the fingerprint of the base model
STEM = "adapter_model"  # how the names of its safetensors begin, by peft's convention
_NAME = ".default"  # the name of the adapter in a model, which files leave out
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    loads: tuple[Published, ...]  # weights of the base model, as its files store them
    saves: tuple[Published, ...]  # weights of the adapter, as its files store them
    settings: Any  # peft's LoraConfig

    def files(self, model_files: Mapping[str, bytes], path: str) -> dict[str, bytes]:
        """Return the files next to the adapter's weights: peft's configuration, and the tokenizer of the model.

        Args:
            model_files: the small files of the model.
            path: directory or hub id of the model.
        """
        directory = with_home(path)
        self.settings.base_model_name_or_path = str(directory.resolve()) if directory.is_dir() else path
        with tempfile.TemporaryDirectory() as folder:
            self.settings.save_pretrained(folder)
            adapter_config = (Path(folder) / ADAPTER_CONFIG).read_bytes()
        weight_configs = ("config.json", "generation_config.json")
        return {ADAPTER_CONFIG: adapter_config} | {
            name: data for name, data in model_files.items() if name not in weight_configs
        }


def adapt(model: PreTrainedModel, section: AdapterSection) -> tuple[Adapter, Fills]:
    """Add adapters to `model`, on the meta device, and freeze the rest; return how to initialise the adapters.

    Raises UserError if peft is not installed or does not find the layers to adapt.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer
        from transformers.pytorch_utils import Conv1D
    except ImportError as error:
        raise MissingToolError("adapter: LoRA needs peft: pip install 'aliquot[lora]'") from error
    if section.path is None:  # a saved adapter may name layers of other models; its weights show what it adapts
        _check_names(model, section.target_modules)
    settings: Any = LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r,
        lora_alpha=section.alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout,
        target_modules=_linear_layers(model) if section.target_modules == "all-linear" else section.target_modules,
        use_rslora=section.use_rslora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    fuse(settings)
    parameters = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    stored = published_of(model, parameters) or tuple(Published(name, shape, name, 0) for name, shape in parameters)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        fills = record_added(model, lambda: inject_adapter_in_model(settings, model))
    except ValueError as error:  # peft refuses unknown names and modules of unsupported types
        raise ConfigError(f"adapter.target_modules: {' '.join(str(error).split())}") from error
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module, Linear):
            raise ConfigError(
                f"adapter.target_modules: {name} is no linear layer (experts are none), and only those are adapted"
            )
    if isinstance(model.get_output_embeddings(), LoraLayer):
        raise ConfigError("adapter.target_modules: the output head is not adapted: head and loss are one step here")
    settings.target_modules = sorted(settings.target_modules)  # peft makes a set, whose order varies
    settings.inference_mode = True
    current_names = {
        names[id(parameter)]: name for name, parameter in model.named_parameters() if id(parameter) in names
    }
    loads = tuple(Published(tensor.name, tensor.shape, current_names[tensor.source], tensor.start) for tensor in stored)
    return Adapter(loads, saves_of(_shapes(model, fills)), settings), fills


def _check_names(model: PreTrainedModel, targets: str | Sequence[str]) -> None:
    """Raise ConfigError for a name without a module: peft ignores such a name if another one has a module."""
    if isinstance(targets, str):
        return
    paths = [path for path, _ in model.named_modules() if path]
    for name in targets:
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            raise ConfigError(
                f"adapter.target_modules: {name!r} is the end of no layer's name; there are"
                f" {', '.join(_linear_layers(model))}"
            )


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of all linear layers but the head and layers that compute more (the router of Llama 4).

    Layers in blocks with experts, and layers named like such blocks, are left out: peft would adapt the experts, too.
    """
    from transformers.pytorch_utils import Conv1D

    blocks = {path.split(".")[-2] for path, module in model.named_modules() if weights_of(module) is not None}
    head = model.get_output_embeddings()
    layers = [
        path
        for path, module in model.named_modules()
        if type(module).forward in (nn.Linear.forward, Conv1D.forward)
        and module is not head
        and blocks.isdisjoint(path.split("."))
    ]
    return sorted({path.rpartition(".")[2] for path in layers})


def saves_of(tensors: Sequence[tuple[str, Shape]]) -> tuple[Published, ...]:
    """Return the weights of an adapter, named as in a run, as its files store them."""
    return tuple(Published(_PREFIX + name.replace(_NAME, ""), shape, name, 0) for name, shape in tensors)


def _shapes(model: PreTrainedModel, fills: Fills) -> list[tuple[str, Shape]]:
    return [(name, tuple(model.get_parameter(name).shape)) for name in fills]
