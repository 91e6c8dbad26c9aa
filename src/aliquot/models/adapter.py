"""LoRA: peft puts two small matrices beside each adapted one; they alone learn, are saved and exported.

Inside a run an adapted matrix is `X.base_layer.weight` beside `X.lora_A.default.weight` and `X.lora_B.default.weight`;
in the model's own files it is `X.weight`, and in an adapter's `base_model.model.X.lora_A.weight`.
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
from aliquot.models.published import Published, published_of
from aliquot.nn.experts.expert_modules import weights_of
from aliquot.tensor_io.bytemap import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "model (hash of samples)"  # by that name a checkpoint's state tells beside which one it was learned
STEM = "adapter_model"  # of its safetensors, by peft's convention
_NAME = ".default"  # of the adapter, in the model but not in its files
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    loads: tuple[Published, ...]  # the model's own weights, as its files hold them
    saves: tuple[Published, ...]  # the adapter's, as its files do
    settings: Any  # peft's LoraConfig

    def files(self, of_model: Mapping[str, bytes], path: str) -> dict[str, bytes]:
        """What lies beside its weights: peft's configuration, and what `of_model`, the files of a model beside its own
        weights, hold about text. `path`: of the model, a directory or a hub id."""
        directory = with_home(path)
        self.settings.base_model_name_or_path = str(directory.resolve()) if directory.is_dir() else path
        with tempfile.TemporaryDirectory() as folder:
            self.settings.save_pretrained(folder)
            own = (Path(folder) / ADAPTER_CONFIG).read_bytes()
        of_weights = ("config.json", "generation_config.json")
        return {ADAPTER_CONFIG: own} | {name: data for name, data in of_model.items() if name not in of_weights}


def adapt(model: PreTrainedModel, section: AdapterSection) -> tuple[Adapter, Fills]:
    """Add adapters to `model`, on the meta device, and freeze the rest; how the adapters are initialised.

    Raises UserError where peft is not there, or does not find what is to be adapted.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer
        from transformers.pytorch_utils import Conv1D

        from aliquot.models.fused_lora import fuse
    except ImportError as error:
        raise MissingToolError("adapter: LoRA needs peft: pip install 'aliquot[lora]'") from error
    if section.path is None:  # a saved adapter may name what other models have: its weights tell what it adapts
        _check_names(model, section.target_modules)
    settings: Any = LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r,
        lora_alpha=section.alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout,
        target_modules=_linear(model) if section.target_modules == "all-linear" else section.target_modules,
        use_rslora=section.use_rslora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    fuse(settings)
    held = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    stored = published_of(model, held) or tuple(Published(name, shape, name, 0) for name, shape in held)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        fills = record_added(model, lambda: inject_adapter_in_model(settings, model))
    except ValueError as error:  # peft says so of names that it does not find, and of modules that it cannot adapt
        raise ConfigError(f"adapter.target_modules: {' '.join(str(error).split())}") from error
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module, Linear):
            raise ConfigError(
                f"adapter.target_modules: {name} is no linear layer (experts are none), and only those are adapted"
            )
    if isinstance(model.get_output_embeddings(), LoraLayer):
        raise ConfigError("adapter.target_modules: the output head is not adapted: head and loss are one step here")
    settings.target_modules = sorted(settings.target_modules)  # peft's is a set, in any order
    settings.inference_mode = True
    now = {names[id(parameter)]: name for name, parameter in model.named_parameters() if id(parameter) in names}
    loads = tuple(Published(each.name, each.shape, now[each.source], each.start) for each in stored)
    return Adapter(loads, saves_of(_shapes(model, fills)), settings), fills


def _check_names(model: PreTrainedModel, wanted: str | Sequence[str]) -> None:
    """Each must be of a module: peft says nothing of one that finds none, if another does."""
    if isinstance(wanted, str):
        return
    there = [path for path, _ in model.named_modules() if path]
    for name in wanted:
        if not any(path == name or path.endswith(f".{name}") for path in there):
            raise ConfigError(
                f"adapter.target_modules: {name!r} is the end of no layer's name; there are {', '.join(_linear(model))}"
            )


def _linear(model: PreTrainedModel) -> list[str]:
    """Names of all linear layers but the head, and but those that compute more (Llama 4's router); of a mixture none in
    the blocks that hold experts, or are called as they are: peft would adapt the experts for them."""
    from transformers.pytorch_utils import Conv1D

    blocks = {path.split(".")[-2] for path, module in model.named_modules() if weights_of(module) is not None}
    head = model.get_output_embeddings()
    found = [
        path
        for path, module in model.named_modules()
        if type(module).forward in (nn.Linear.forward, Conv1D.forward)
        and module is not head
        and blocks.isdisjoint(path.split("."))
    ]
    return sorted({path.rpartition(".")[2] for path in found})


def saves_of(tensors: Sequence[tuple[str, Shape]]) -> tuple[Published, ...]:
    """An adapter's weights, named as in a run, as its files hold them."""
    return tuple(Published(_PREFIX + name.replace(_NAME, ""), shape, name, 0) for name, shape in tensors)


def _shapes(model: PreTrainedModel, fills: Fills) -> list[tuple[str, Shape]]:
    return [(name, tuple(model.get_parameter(name).shape)) for name in fills]
