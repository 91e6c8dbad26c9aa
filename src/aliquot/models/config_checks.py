"""Refuse model configurations that cannot be trained: out of scope, quantised, or with absurd numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from aliquot.core.errors import ModelFilesError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Limits far above any model, for keys that decide how many modules are built or counted.
_LIMITS = {
    re.compile(r"(.*_)?(layers?|blocks|layers_per_stack)|attention_types"): (10_000, "layers"),
    re.compile(r"(.*_)?experts"): (65_536, "experts"),
    re.compile(r"(.*_)?vocab_size"): (100_000_000, "tokens in its vocabulary"),
    re.compile(r"num_labels"): (1_000_000, "labels"),
    # Weights of such a width would stay on the meta device, but rotary frequencies are computed.
    re.compile(r"(?!(.*_)?vocab_size)(.*_)?(size|dim|rank|heads?|model|embd|inner|ff)"): (10_000_000, "columns"),
}


def refuse_absurd_counts(values: dict[str, Any], where: str) -> None:
    """Raise UserError that names a key with an absurd value, also in nested configurations."""
    for path, count in _integers(values):
        key = path.rpartition(".")[2]
        for pattern, (limit, unit) in _LIMITS.items():
            if count > limit and pattern.fullmatch(key):
                raise ModelFilesError(f"{path} is {count}: no model has more than {limit} {unit}", where)


def _integers(values: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield all integers with their keys, also in lists such as GPT-Neo's [kinds of layers, count]."""
    waiting: list[tuple[str, Any]] = list(values.items())
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, int):
            yield path, value
        elif isinstance(value, list):
            waiting += [(path, item) for item in value]
        elif isinstance(value, dict):
            waiting += [(f"{path}.{key}", item) for key, item in value.items()]


def refuse_empty_window(config: PretrainedConfig, where: str) -> None:
    """Raise ModelFilesError for an empty window: it masks every token, and transformers then attends to all tokens."""
    text = config.get_text_config(decoder=True)
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    slides = kinds is None or any("sliding" in str(kind) for kind in kinds)
    if isinstance(window, int) and window < 1 and slides:
        raise ModelFilesError(
            f"sliding_window is {window}: in such a window a token does not even see itself. Write null for attention"
            " without a window",
            where,
        )


def refuse_out_of_scope(config: PretrainedConfig, where: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models are not supported", where)
    if getattr(config, "vision_config", None) is not None:
        raise UnsupportedModelError("vision models are not supported", where)
    if getattr(config, "audio_config", None) is not None:
        raise UnsupportedModelError("audio models are not supported", where)
    dropped = [key for key, value in config.to_dict().items() if "layerdrop" in str(key) and value]
    if dropped:
        raise UnsupportedModelError(
            f"layers that are left out at random are not supported: set {dropped[0]} to 0", where
        )
    if getattr(config, "z_loss_coefficient", None):
        raise UnsupportedModelError("a loss of the logits' size is not supported: set z_loss_coefficient to 0", where)
    if getattr(config, "attention_type", None) == "block_sparse":
        raise UnsupportedModelError(
            "attention over random blocks is not supported: set attention_type to original_full", where
        )
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True  # BERT and its relatives attend to later tokens unless they are decoders


def _quantization(config: PretrainedConfig) -> dict[str, Any] | None:
    settings = getattr(config, "quantization_config", None)
    return settings if settings is None or isinstance(settings, dict) else settings.to_dict()


def without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration without its quantization: a run trains and exports plain weights."""
    if _quantization(config):
        del config.quantization_config
    return config


def refuse_quantized(config: PretrainedConfig, where: str) -> None:
    """Raise UnsupportedModelError for quantised weights, whose layers compute another function than trained ones."""
    if settings := _quantization(config):
        method = settings.get("quant_method", "quantised")
        raise UnsupportedModelError(
            f"weights that are stored as {method} (quantization_config) are not supported: take the model's unquantised"
            " ones, or remove the key if these are",
            where,
        )
