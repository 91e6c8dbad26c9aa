"""What a model is, for the planner: its weights by group, and its kinds of decoder layers. No bytes of it exist."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from aliquot.config.schema import RunConfig
from aliquot.models import meta
from aliquot.models.source import CONFIG_FILES, resolve
from aliquot.models.structure import decoder_layers
from aliquot.models.traits import traits

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerKind:
    """Decoder layers, at `positions`, that have weights of the same shapes and attend as far back."""

    weights: tuple[Shape, ...]
    window: int | None
    positions: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """`layers`, `embedding` and `head` together with `rest` are all weights, each once; a tied head has none."""

    name: str
    config: PretrainedConfig
    built: meta.MetaModel
    kinds: tuple[LayerKind, ...]
    embedding: Shape
    head: Shape | None  # None: tied to the embedding
    rest: tuple[Shape, ...]  # final norm and the like
    dtype_bytes: int  # an element of the weights as they are stored

    @property
    def numel(self) -> int:
        return self.built.numel

    @property
    def vocabulary(self) -> int:
        return self.embedding[0]

    @property
    def width(self) -> int:
        return self.embedding[1]

    @property
    def layers(self) -> int:
        return sum(len(kind.positions) for kind in self.kinds)

    def as_llama(self) -> ModelShape:
        """A Llama of as many layers of about as many weights each, with the same vocabulary and width."""
        from transformers import AutoConfig

        heads = int(getattr(self.config, "num_attention_heads", None) or max(1, self.width // 64))
        of_layers = sum(numel(weight) * len(kind.positions) for kind in self.kinds for weight in kind.weights)
        inner = (of_layers // self.layers - 4 * self.width**2) // (3 * self.width)
        config = AutoConfig.for_model(
            "llama",
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=max(inner, self.width),
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=max(2, self.width // heads // 2 * 2),
            tie_word_embeddings=self.head is None,
        )
        built = meta.build(config)
        weights = tuple(tuple(parameter.shape) for parameter in decoder_layers(built.model)[0].parameters())
        kind = LayerKind(weights, None, tuple(range(self.layers)))
        return replace(self, config=config, built=built, kinds=(kind,))

    def groups(self) -> list[list[Shape]]:
        """What engine fsdp gathers together, in the order of the forward pass after the root: root, layers, head."""
        of_layer = {position: list(kind.weights) for kind in self.kinds for position in kind.positions}
        layers = [of_layer[position] for position in sorted(of_layer)]
        head = [] if self.head is None else [[self.head]]
        return [[self.embedding, *self.rest], *layers, *head]


def model_shape(config: RunConfig, vocabulary: int | None = None) -> ModelShape:
    """The model of `config`, built on the meta device. Raises UserError as training it would.

    `vocabulary`: rows of its embedding, where the tokenizer has told them.
    """
    source = resolve(config.model, CONFIG_FILES)
    source.assume_vocabulary(vocabulary or config.data.tokenizer_vocab_size or source.config.vocab_size)
    source.check_length(config.data.sequence_length)
    built = meta.build(source.config, traits(source.config, config.data.sequence_length))
    model = built.model
    layers = decoder_layers(model)
    found: dict[tuple[tuple[Shape, ...], int | None], list[int]] = {}
    for position, layer in enumerate(layers):
        weights = tuple(tuple(parameter.shape) for parameter in layer.parameters())
        found.setdefault((weights, _window(layer, source.config)), []).append(position)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    head = embedding if output is None else output.weight
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside and p is not embedding and p is not head]
    return ModelShape(
        name=built.name,
        config=source.config,
        built=built,
        kinds=tuple(LayerKind(weights, window, tuple(at)) for (weights, window), at in found.items()),
        embedding=tuple(embedding.shape),
        head=None if head is embedding else tuple(head.shape),
        rest=tuple(tuple(parameter.shape) for parameter in rest),
        dtype_bytes=source.dtype.itemsize if source.dtype is not None else 2,
    )


def numel(shape: Shape) -> int:
    return math.prod(shape)


def padded_share(shape: Shape, ranks: int) -> int:
    """Elements of the largest part of a weight by the dim-0 rule: ceil(rows / ranks) rows."""
    return -(-(shape[0] if shape else 1) // ranks) * math.prod(shape[1:])


def _window(layer: nn.Module, config: PretrainedConfig) -> int | None:
    """How many tokens back the attention of a layer sees: by its module, where that says so, else by the config."""
    told = [module.sliding_window for module in layer.modules() if hasattr(module, "sliding_window")]
    window = told[0] if told else getattr(config, "sliding_window", None)
    return cast("int | None", window)
