"""Build a model on the meta device, to learn its weights' names, shapes, cost and initialisation without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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
from aliquot.models.adapter import Adapter, adapt, compressible
from aliquot.models.narrow import for_training, has_dropout, without_dropout
from aliquot.models.structure import decoder_layers, fp32_weights, freeze_buffers, tied_weights
from aliquot.models.traits import Traits, traits
from aliquot.models.untrusted_code import model_from_config
from aliquot.nn.attention.document_attention import register
from aliquot.nn.experts.expert_modules import weights_of
from aliquot.nn.experts.sorted_experts import IMPLEMENTATION, suits
from aliquot.nn.experts.sorted_experts import register as register_experts
from aliquot.tensor_io.code_sizes import CompressedFormat

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")


@dataclass(frozen=True)
class MetaModel:
    """A model whose parameters are on the meta device and whose non-persistent buffers are real, on CPU."""

    # The other fields are computed before an engine shards `model`, because FSDP2 then changes the class of the model
    # and ZeRO-3 changes the shapes of its weights.
    name: str  # name of the model's class
    model: PreTrainedModel
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of all weights, in the model's order
    tied: dict[str, str]  # alias of a tied weight -> the weight's name in `tensors`
    learned: frozenset[str]  # names of trained weights
    exact: frozenset[str]  # names of weights that transformers keeps in fp32 in a model of any dtype
    fills: initialize.Fills  # how to initialise weights: as the model's _init_weights does, or as peft does
    matmul_flops: int  # FLOPs per token in matrix products, forward and backward
    vocabulary: tuple[str, ...]  # weights with a row for each token: the embedding and, if untied, the output head
    traits: Traits
    dropout: bool  # whether the configuration or the adapter has dropout
    adapter: Adapter | None
    base: CompressedFormat = "bf16"  # format of the frozen weights in `compressed`
    compressed: frozenset[str] = frozenset()

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for _, shape in self.tensors)

    @property
    def learned_numel(self) -> int:
        return sum(torch.Size(shape).numel() for name, shape in self.tensors if name in self.learned)

    @property
    def saved(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the tensors that a checkpoint stores: all weights, or with an adapter only the adapter's weights."""
        if self.adapter is None:
            return self.tensors
        return tuple(tensor for tensor in self.tensors if tensor[0] in self.learned)


def build(
    config: PretrainedConfig,
    known: Traits | None = None,
    adapter: AdapterSection | None = None,
    frozen: Sequence[str] = (),
    drops: bool = True,
    beside_nf4: Sequence[str] | None = None,
) -> MetaModel:
    """Build the model of `config` on the meta device.

    If the model packs, it gets aliquot's attention, which separates the documents of a row.

    Args:
        known: the traits of the model, if the caller has measured them.
        adapter: the LoRA adapter to add.
        frozen: name patterns of weights to freeze.
        drops: whether dropout of the model and the adapter is active in training.
        beside_nf4: if the files store weights in nf4, the modules whose weights they store in 16 bits. Weights in nf4
            keep their scales, because double quantisation would change them.

    Raises UserError for a model that transformers cannot run, that is not causal or that lacks layers or an embedding.
    Raises UserError also for an adapter or patterns that do not fit the model.
    """
    model_traits = known or traits(config)
    register()
    register_experts()
    with torch.device("meta"):
        try:
            model = model_from_config(
                for_training(config if drops else without_dropout(config)),
                dtype=torch.float32,
                attn_implementation=model_traits.attention,
            )
        except Exception as error:  # each model's code fails in its own way on a config it does not like
            raise UnsupportedModelError(f"transformers cannot build this {config.model_type} model: {error}") from error
    config.architectures = [type(model).__name__]
    _take_experts(model)
    freeze_buffers(model)
    if not decoder_layers(model) or model.get_input_embeddings() is None:
        part = "input embedding" if decoder_layers(model) else "decoder layers"
        raise UnsupportedModelError(f"{type(model).__name__}: no {part} found: model not supported")
    fills = initialize.record(model)
    vocabulary = _vocabulary_weights(model)
    adapter_weights = None
    if adapter is not None:
        adapter_weights, fills = adapt(model, adapter if drops else adapter.model_copy(update={"dropout": 0.0}))
    freeze(model, frozen)
    base: CompressedFormat = "bf16" if adapter is None else adapter.base
    if base == "nf4" and beside_nf4 is not None:
        base = "nf4_single"
    return MetaModel(
        name=type(model).__name__,
        model=model,
        tensors=tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters()),
        tied=tied_weights(model),
        learned=frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad),
        exact=fp32_weights(model),
        fills=fills,
        matmul_flops=matmul_flops(model),
        vocabulary=vocabulary,
        traits=model_traits,
        dropout=drops and has_dropout(config, adapter),
        adapter=adapter_weights,
        base=base,
        compressed=frozenset() if base == "bf16" else compressible(model, beside_nf4 or ()),
    )


def _take_experts(model: PreTrainedModel) -> None:
    """Let aliquot's implementation compute the experts, or transformers' eager one if aliquot's does not support them.

    A model stays unchanged if transformers offers no choice of its expert implementation.
    """
    experts = [module for module in model.modules() if weights_of(module) is not None]
    if experts:
        with suppress(ValueError):  # transformers refuses models whose experts cannot be replaced
            model.set_experts_implementation(IMPLEMENTATION if all(map(suits, experts)) else "eager")


def _vocabulary_weights(model: PreTrainedModel) -> tuple[str, ...]:
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = [id(weight) for module in modules if module is not None for weight in module.parameters()]
    return tuple(name for name, weight in model.named_parameters() if id(weight) in weights)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the weights whose names match any of `patterns`.

    Raises ConfigError for a pattern that matches no weight, and if no trained weight remains.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [weight for name, weight in weights.items() if fnmatchcase(name, pattern)]
        if not matching:
            near = get_close_matches(pattern, weights, n=1, cutoff=0.0)
            raise ConfigError(
                f"train.freeze: no weight is named {pattern}. {near[0]} names one weight, `*.bias` names many"
            )
        for weight in matching:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise ConfigError(
            "train.freeze: the patterns freeze every weight, so that nothing is trained: remove a pattern"
        )


def matmul_flops(model: PreTrainedModel) -> int:
    """Count the FLOPs per token in matrix products, forward and backward.

    Each element of a matrix costs 2 FLOPs for the output. The gradient of the input costs 2 more if an earlier weight
    is trained. The gradient of the matrix costs 2 more if the matrix is trained.
    """
    order = {id(parameter): at for at, parameter in enumerate(model.parameters())}
    first = min((at for at, parameter in enumerate(model.parameters()) if parameter.requires_grad), default=len(order))
    embedding = model.get_input_embeddings().weight
    flops = 0.0
    for matrix, numel in _matrices(model):
        after = matrix is embedding or order[id(matrix)] > first  # a tied embedding is multiplied last, as the head
        flops += numel * (2 + 2 * (after and first < len(order)) + 2 * matrix.requires_grad)
    return int(flops)


def _matrices(model: PreTrainedModel) -> Iterator[tuple[nn.Parameter, float]]:
    """Yield each matrix with the number of its elements that are multiplied with each token."""
    config = model.config
    experts = next((n for key in EXPERTS if isinstance(n := getattr(config, key, None), int) and n), 0)
    chosen = next((n for key in CHOSEN if isinstance(n := getattr(config, key, None), int) and n), experts)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for parameter in model.parameters():
        holds_experts = parameter.ndim >= 3 and parameter.shape[0] == experts
        if parameter.ndim >= 2 and (tied or parameter is not embedding.weight):
            yield parameter, parameter.numel() * (chosen / experts if holds_experts else 1)


def attention_widths(config: PretrainedConfig) -> dict[int | None, int]:
    """Return the sum of heads x head size over the layers, by attention window in tokens (None: no window).

    The sum is the number of multiply-adds for one (query, key) pair in each of attention's two matrix products. Layers
    without softmax attention (state-space, linear attention) do not count.
    """
    config = config.get_text_config(decoder=True)
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if not heads:
        return {}
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    window = getattr(config, "sliding_window", None)
    everywhere = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    widths: Counter[int | None] = Counter()
    for kind in kinds or [everywhere] * int(config.num_hidden_layers):
        if kind in _ATTENTION:
            widths[window if kind == "sliding_attention" else None] += heads * head_dim
    return dict(widths)
