"""A model on the meta device and its shape. The planner runs the model to count the memory and work of a step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
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
    """A model on the meta device, and its shape as numbers."""

    config: PretrainedConfig
    built: meta.MetaModel
    shape: ModelShape
    # Cache of the planner's runs on the meta device: (peak bytes, work), by settings and inputs.
    evaluations: dict[Hashable, tuple[int, Any]] = field(default_factory=dict)

    def as_llama(self) -> ShapedModel:
        """Return a Llama model of about the same size.

        It has the same vocabulary, width and number of layers, and about as many parameters in each layer.
        """
        from transformers import AutoConfig

        shape = self.shape
        heads = int(getattr(self.config, "num_attention_heads", None) or max(1, shape.width // 64))
        layer_numel = sum(numel(weight) * len(kind.positions) for kind in shape.kinds for weight in kind.weights)
        inner = (layer_numel // shape.layers - 4 * shape.width**2) // (3 * shape.width)
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
        weights = _shapes(decoder_layers(built.model)[0].parameters())
        kind = LayerKind(weights, weights, None, tuple(range(shape.layers)))
        return ShapedModel(config, built, replace(shape, kinds=(kind,)))


def shaped_model(config: RunConfig, vocabulary: int | None = None) -> ShapedModel:
    """Build the model of `config` on the meta device. Raises UserError as training would.

    `vocabulary` is the size of the tokenizer's vocabulary, if the tokenizer is known.
    """
    source = resolve(config.model, CONFIG_FILES)
    tokens = vocabulary or config.data.tokenizer_vocab_size or source.config.vocab_size
    source.adopt_tokenizer(None, tokens - 1, added=True)
    source.check_length(config.data.sequence_length, config.train.answers)
    model_traits = traits(source.config, config.data.sequence_length, config.train.drops)
    built = meta.build(
        source.config, model_traits, config.adapter, config.train.freeze, config.train.drops, source.beside_nf4
    )
    model = built.model
    layers = decoder_layers(model)
    compressed = {id(model.get_parameter(name)) for name in built.compressed}
    kinds: dict[LayerKind, list[int]] = {}  # without positions -> the positions
    for position, layer in enumerate(layers):
        kind = LayerKind(
            weights=_shapes(layer.parameters()),
            learned=_shapes(p for p in layer.parameters() if p.requires_grad),
            window=_window(layer, source.config),
            positions=(),
            compressed=_shapes(p for p in layer.parameters() if id(p) in compressed),
        )
        kinds.setdefault(kind, []).append(position)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    head = embedding if output is None else output.weight
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside and p is not embedding and p is not head]
    # A tied embedding that engine host looks up does not count: its gradient is that of the head, and the rows of its
    # tokens are sent to other hosts separately.
    looks_up_apart = model_traits.looks_up != (head is embedding)
    shape = ModelShape(
        name=built.name,
        weights=tuple(weight for _, weight in built.tensors),
        learned=tuple(weight for name, weight in built.tensors if name in built.learned),
        kinds=tuple(replace(kind, positions=tuple(positions)) for kind, positions in kinds.items()),
        embedding=tuple(embedding.shape),
        head=None if head is embedding else tuple(head.shape),
        rest=_shapes(rest),
        embedding_learns=embedding.requires_grad,
        head_learns=head.requires_grad,
        rest_learns=any(parameter.requires_grad for parameter in rest),
        embedding_is_added_to=embedding.requires_grad and model_traits.plain_head and looks_up_apart,
        dtype_bytes=source.dtype.itemsize if source.dtype is not None else 2,
        packs=built.traits.packs,
        base=built.base,
        depends_on_micro_batches=built.dropout or getattr(source.config, "output_router_logits", False),
    )
    return ShapedModel(source.config, built, shape)


def _shapes(parameters: Iterable[nn.Parameter]) -> tuple[Shape, ...]:
    return tuple(tuple(parameter.shape) for parameter in parameters)


def _window(layer: nn.Module, config: PretrainedConfig) -> int | None:
    """Return the attention window of a layer, from its modules or else from the configuration; None: no window."""
    windows = [module.sliding_window for module in layer.modules() if hasattr(module, "sliding_window")]
    return cast("int | None", windows[0] if windows else getattr(config, "sliding_window", None))
