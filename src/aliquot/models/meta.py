"""Build a model on the meta device: names, shapes and initialisation of its weights, without a byte of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from aliquot.config.adapter_section import AdapterSection
from aliquot.core.errors import ConfigError, UnsupportedModelError
from aliquot.models import initialize
from aliquot.models.adapter import Adapter, adapt
from aliquot.models.materialise import freeze_buffers, tied_weights
from aliquot.models.narrow import for_training, has_dropout
from aliquot.models.remote_code import without_code
from aliquot.models.structure import decoder_layers, kept_in_fp32, matmul_flops, matmul_parameters
from aliquot.models.traits import Traits, traits
from aliquot.nn.attention.document_attention import register
from aliquot.nn.experts.expert_modules import weights_of
from aliquot.nn.experts.sorted_experts import IMPLEMENTATION, suits
from aliquot.nn.experts.sorted_experts import register as register_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class MetaModel:
    """A model whose parameters are on the meta device and whose non-persistent buffers are real, on CPU."""

    # All but `model` is noted before an engine shards it: FSDP2 changes its class, ZeRO-3 the shapes of its weights.
    name: str  # of its class
    model: PreTrainedModel
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # every weight once, in the model's order
    tied: dict[str, str]  # further name -> the name under which it is in `tensors`
    learned: frozenset[str]  # of `tensors`
    exact: frozenset[str]  # of `tensors`, those that transformers keeps in fp32 whatever the others have
    fills: initialize.Fills  # how what is drawn is: by the model's own _init_weights, or by peft's
    matmul_parameters: int  # multiply every token: all matrices but the input embedding; a tied head counts once
    matmul_flops: int  # of a token in them, forward and backward
    vocabulary: tuple[str, ...]  # the weights that have a row a token: of the embedding, and of a head of its own
    traits: Traits
    dropout: bool  # its configuration has some, or its adapter
    adapter: Adapter | None

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for _, shape in self.tensors)

    @property
    def learned_numel(self) -> int:
        return sum(torch.Size(shape).numel() for name, shape in self.tensors if name in self.learned)

    @property
    def saved(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Of `tensors`, those that a checkpoint holds: with an adapter the others are in the model's own files."""
        return self.tensors if self.adapter is None else tuple(each for each in self.tensors if each[0] in self.learned)


def build(
    config: PretrainedConfig,
    known: Traits | None = None,
    adapter: AdapterSection | None = None,
    frozen: Sequence[str] = (),
) -> MetaModel:
    """The model of `config` on the meta device, with attention per document where it packs. `frozen`: patterns.

    Raises UserError for one that transformers cannot run, that is not causal, or whose parts cannot be told apart, and
    for an adapter or patterns that do not suit it.
    """
    from transformers import AutoModelForCausalLM

    found = known or traits(config)
    register()
    register_experts()
    with torch.device("meta"):
        try:
            model: PreTrainedModel = without_code(AutoModelForCausalLM.from_config)(
                for_training(config), dtype=torch.float32, attn_implementation=found.attention
            )
        except Exception as error:  # each model's code fails in its own way on a config it does not like
            raise UnsupportedModelError(f"transformers cannot build this {config.model_type} model: {error}") from error
    config.architectures = [type(model).__name__]
    _take_experts(model)
    freeze_buffers(model)
    _check_layout(model)
    fills = initialize.record(model)
    name, dropout = type(model).__name__, has_dropout(config)
    of_vocabulary = _of_vocabulary(model)
    added = None
    if adapter is not None:
        added, fills = adapt(model, adapter)
    freeze(model, frozen)
    return MetaModel(
        name=name,
        model=model,
        tensors=tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters()),
        tied=tied_weights(model),
        learned=frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad),
        exact=kept_in_fp32(model),
        fills=fills,
        matmul_parameters=matmul_parameters(model),
        matmul_flops=matmul_flops(model),
        vocabulary=of_vocabulary,
        traits=found,
        dropout=dropout or (adapter is not None and adapter.dropout > 0),
        adapter=added,
    )


def _take_experts(model: PreTrainedModel) -> None:
    """Our experts where transformers lets a model have them and they compute what its own do, else its plain ones."""
    experts = [module for module in model.modules() if weights_of(module) is not None]
    if experts:
        with suppress(ValueError):  # transformers says so of a model whose experts nobody can replace
            model.set_experts_implementation(IMPLEMENTATION if all(map(suits, experts)) else "eager")


def _of_vocabulary(model: PreTrainedModel) -> tuple[str, ...]:
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = [id(weight) for module in modules if module is not None for weight in module.parameters()]
    return tuple(name for name, weight in model.named_parameters() if id(weight) in weights)


def _check_layout(model: PreTrainedModel) -> None:
    kind = type(model).__name__
    if not decoder_layers(model):
        raise UnsupportedModelError(f"{kind}: no decoder layers found: model not supported")
    if model.get_input_embeddings() is None:
        raise UnsupportedModelError(f"{kind}: no input embedding found: model not supported")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the weights whose names match any of `patterns`, of which each must match some. Raises ConfigError."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [weight for name, weight in weights.items() if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, weights, n=1, cutoff=0.0)
            raise ConfigError(f"train.freeze: no weight is named {pattern}; one is {near[0]}, and `*.bias` means many")
        for weight in found:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise ConfigError("train.freeze: nothing is left to learn")
