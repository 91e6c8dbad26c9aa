"""A model on the meta device together with its shape: what the planner runs where it does not know a model yet."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from aliquot.config.schema import RunConfig
from aliquot.models import meta
from aliquot.models.model_shape import LayerKind, ModelShape, Shape, numel
from aliquot.models.source import CONFIG_FILES, resolve
from aliquot.models.structure import decoder_layers
from aliquot.models.traits import traits

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ShapedModel:
    """No bytes of its weights exist."""

    config: PretrainedConfig
    built: meta.MetaModel
    shape: ModelShape
    evaluations: dict[Hashable, tuple[int, Any]] = field(default_factory=dict)  # bytes and work, by how and over what

    def as_llama(self) -> ShapedModel:
        """A Llama of as many layers of about as many weights each, with the same vocabulary and width."""
        from transformers import AutoConfig

        shape = self.shape
        heads = int(getattr(self.config, "num_attention_heads", None) or max(1, shape.width // 64))
        of_layers = sum(numel(weight) * len(kind.positions) for kind in shape.kinds for weight in kind.weights)
        inner = (of_layers // shape.layers - 4 * shape.width**2) // (3 * shape.width)
        config = AutoConfig.for_model(
            "llama",
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=max(inner, shape.width),
            num_hidden_layers=shape.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=max(2, shape.width // heads // 2 * 2),
            tie_word_embeddings=shape.head is None,
        )
        built = meta.build(config)
        weights = tuple(tuple(parameter.shape) for parameter in decoder_layers(built.model)[0].parameters())
        kind = LayerKind(weights, weights, None, tuple(range(shape.layers)))
        return ShapedModel(config, built, replace(shape, kinds=(kind,)))


def shaped_model(config: RunConfig, vocabulary: int | None = None) -> ShapedModel:
    """The model of `config`. Raises UserError as training it would.

    `vocabulary`: rows of its embedding, where the tokenizer has told them.
    """
    source = resolve(config.model, CONFIG_FILES)
    source.assume_vocabulary(vocabulary or config.data.tokenizer_vocab_size or source.config.vocab_size)
    source.check_length(config.data.sequence_length)
    known = traits(source.config, config.data.sequence_length)
    built = meta.build(source.config, known, config.adapter, config.train.freeze)
    model = built.model
    layers = decoder_layers(model)
    found: dict[tuple[tuple[Shape, ...], tuple[Shape, ...], int | None], list[int]] = {}
    for position, layer in enumerate(layers):
        weights = tuple(tuple(parameter.shape) for parameter in layer.parameters())
        learned = tuple(tuple(parameter.shape) for parameter in layer.parameters() if parameter.requires_grad)
        found.setdefault((weights, learned, _window(layer, source.config)), []).append(position)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    head = embedding if output is None else output.weight
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside and p is not embedding and p is not head]
    shape = ModelShape(
        name=built.name,
        weights=tuple(weight for _, weight in built.tensors),
        learned=tuple(weight for name, weight in built.tensors if name in built.learned),
        kinds=tuple(LayerKind(*kind, tuple(at)) for kind, at in found.items()),
        embedding=tuple(embedding.shape),
        head=None if head is embedding else tuple(head.shape),
        rest=tuple(tuple(parameter.shape) for parameter in rest),
        embedding_learns=embedding.requires_grad,
        head_learns=head.requires_grad,
        rest_learns=any(parameter.requires_grad for parameter in rest),
        # Tied, it gets the head's gradient and rows that follow it to other hosts.
        embedding_is_added_to=embedding.requires_grad and known.plain_head and known.looks_up != (head is embedding),
        dtype_bytes=source.dtype.itemsize if source.dtype is not None else 2,
        packs=built.traits.packs,
    )
    return ShapedModel(source.config, built, shape)


def _window(layer: nn.Module, config: PretrainedConfig) -> int | None:
    """How many tokens back the attention of a layer sees: by its module, where that says so, else by the config."""
    told = [module.sliding_window for module in layer.modules() if hasattr(module, "sliding_window")]
    window = told[0] if told else getattr(config, "sliding_window", None)
    return cast("int | None", window)
