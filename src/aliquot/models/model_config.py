"""Read and check the config.json of a model, and reduce a configuration to the settings that affect computation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliquot.config.adapter_section import ADAPTER_CONFIG
from aliquot.core.decode import read_json_object
from aliquot.core.errors import ModelFilesError, UnsupportedModelError, reason_of
from aliquot.models.narrow import is_dropout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Limits far above any real model, for keys that set the number or the size of modules.
_LIMITS = {
    re.compile(r"(.*_)?(layers?|blocks|layers_per_stack)|attention_types"): (10_000, "layers"),
    re.compile(r"(.*_)?experts"): (65_536, "experts"),
    re.compile(r"(.*_)?vocab_size"): (100_000_000, "tokens in its vocabulary"),
    re.compile(r"num_labels"): (1_000_000, "labels"),
    # Even on the meta device the rotary frequencies of an absurd width need memory.
    re.compile(r"(?!(.*_)?vocab_size)(.*_)?(size|dim|rank|heads?|model|embd|inner|ff)"): (10_000_000, "columns"),
}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# Keys that do not affect the function that the weights compute: special tokens, auxiliary losses, the attention
# implementation, initialisation, caching and the format of outputs. These keys may change when training continues.
_ELSEWHERE = ("_token_id", "_loss", "implementation", "initializer", "init_std")
# Keys of models for images or sound that also apply to their text model, whose own values are often mere defaults.
_WHOLE = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config"}
_OTHERS = {"use_cache", "torch_dtype", "pretraining_tp", "output_router_logits", "output_attentions"}


def read_fields(file: Path, key: str) -> dict[str, Any]:
    """Read a config.json; `key` is the aliquot setting that names the file, for errors. Raises ModelFilesError."""
    try:
        return read_json_object(file, "anywhere" if key == "model.config" else "inside")
    except FileNotFoundError:
        if (file.parent / ADAPTER_CONFIG).is_file():
            raise ModelFilesError(
                f"{key}: an adapter, not a model: aliquot export CHECKPOINT OUT --merge makes one of it", file.parent
            ) from None
        advice = model_of_run(file.parent) or "is this a Hugging Face model directory?"
        raise ModelFilesError(f"{key}: no config.json here; {advice}", file) from None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{key}: {error}", file) from None


def model_of_run(directory: Path) -> str:
    """Return where the model of a run is, for an error about the run directory; empty if no model is there."""
    export = directory / "export"
    has_model = any((export / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    return f"the model of this run is {export}" if has_model else ""


def parse_config(values: dict[str, Any], where: str) -> PretrainedConfig:
    """Make a transformers configuration from the fields of a config.json.

    `where` is the file or key to name in errors. Raises UserError for a model that aliquot does not train.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    values = {key: with_floats(value) for key, value in values.items()}
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ModelFilesError("model_type is missing; for example model_type: llama", where)
    if model_type not in CONFIG_MAPPING_NAMES:
        raise ModelFilesError(f"model_type {model_type!r} is not a causal language model of transformers", where)
    _refuse_absurd_counts(values, where)
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # each configuration checks itself in its own way
        raise ModelFilesError(f"not a valid {model_type} configuration: {reason_of(error)}", where) from error
    config = _text_part(config, values, where)
    _refuse_out_of_scope(config, where)
    _refuse_empty_window(config, where)
    return config


def _text_part(config: PretrainedConfig, values: Mapping[str, Any], where: str) -> PretrainedConfig:
    """Return the configuration of the text model in a model for images, video or sound; `config` if it has text only.

    `values` are the fields of config.json; those that describe the whole model replace the fields of its text model.
    Raises ModelFilesError if transformers has no causal language model for the text.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    parts = (getattr(config, key, None) for key in ("vision_config", "audio_config"))
    kind, has_senses = config.model_type, any(part is not None for part in parts)
    if kind in CAUSAL and not has_senses:
        return config
    text = config.get_text_config(decoder=True)
    # The models of Cohere for images do not scale their logits, as the model of their text part does.
    if text.model_type not in CAUSAL or text.model_type == kind or kind in ("aya_vision", "cohere2_vision"):
        reason = ", and no such model computes what its text part computes" if has_senses else ""
        raise ModelFilesError(f"model_type {kind!r} is not a causal language model of transformers{reason}", where)
    for key in _WHOLE & values.keys():
        setattr(text, key, getattr(config, key))
    text.dtype = text.dtype or config.dtype
    return text


def with_floats(value: Any) -> Any:
    """Decode infinities, which transformers 5 writes as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {key: with_floats(item) for key, item in value.items()}


def _refuse_absurd_counts(values: dict[str, Any], where: str) -> None:
    """Raise UserError for a key with an absurdly large value, also in nested configurations."""
    for path, count in _integers(values):
        key = path.rpartition(".")[2]
        for pattern, (limit, unit) in _LIMITS.items():
            if count > limit and pattern.fullmatch(key):
                raise ModelFilesError(f"{path} is {count}: no model has more than {limit} {unit}", where)


def _integers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield all integers with the paths of their keys, also from lists such as GPT-Neo's [kinds of layers, count]."""
    if isinstance(value, int):
        yield path, value
    elif isinstance(value, list):
        for item in value:
            yield from _integers(item, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _integers(item, f"{path}.{key}".removeprefix("."))


def _refuse_empty_window(config: PretrainedConfig, where: str) -> None:
    """Raise ModelFilesError for an empty attention window.

    An empty window masks every token, and transformers attends to all tokens if every token is masked.
    """
    text = config.get_text_config(decoder=True)
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    slides = kinds is None or any("sliding" in str(kind) for kind in kinds)
    if isinstance(window, int) and window < 1 and slides:
        raise ModelFilesError(
            f"sliding_window is {window}: in such a window a token does not even see itself. Write null for attention"
            " without a window",
            where,
        )


def _refuse_out_of_scope(config: PretrainedConfig, where: str) -> None:
    dropped = [key for key, value in config.to_dict().items() if "layerdrop" in str(key) and value]
    refusals = {
        "encoder-decoder models are": getattr(config, "is_encoder_decoder", False),
        "dropout of whole layers is": f"set {dropped[0]} to 0" if dropped else None,
        "a z-loss on the logits is": getattr(config, "z_loss_coefficient", None) and "set z_loss_coefficient to 0",
        "attention over random blocks is": getattr(config, "attention_type", None) == "block_sparse"
        and "set attention_type to original_full",
    }
    for feature, remedy in refusals.items():
        if remedy:
            advice = f": {remedy}" if isinstance(remedy, str) else ""
            raise UnsupportedModelError(f"{feature} not supported{advice}", where)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True  # BERT and its relatives attend to later tokens unless they are decoders


def without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """Remove the quantization settings from a configuration, because aliquot trains and exports unquantised weights."""
    if getattr(config, "quantization_config", None):
        del config.quantization_config
    return config


def modules_beside_nf4(config: PretrainedConfig, where: str) -> tuple[str, ...] | None:
    """Return the modules whose weights the files do not store in nf4, if they store other weights in nf4; else None.

    Raises UnsupportedModelError if the files store weights in a format that models/packed_weights.py cannot read.
    """
    settings: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    if _NF4.items() <= settings.items():
        return tuple(map(str, settings.get("llm_int8_skip_modules") or ()))
    method = settings and settings.get("quant_method", "quantised")
    if method and method != "mxfp4":
        raise UnsupportedModelError(
            f"weights that are stored as {method} (quantization_config) are not supported: take the model's unquantised"
            " weights, or remove the key if the weights are unquantised",
            where,
        )
    return None


def computation_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings that determine the function a model computes, and the version of transformers, as JSON."""
    import transformers

    # Names, labels and dtypes have no effect on the computation.
    common_keys = transformers.PretrainedConfig().to_dict().keys() - {"model_type"}
    values = json.loads(json.dumps(config.to_dict(), default=str))
    return {"transformers": transformers.__version__, "config": _without(values, common_keys | _OTHERS)}


def _without(values: dict[str, Any], excluded: set[str]) -> dict[str, Any]:
    return {
        key: _without(value, excluded) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in excluded and not key.startswith("_") and not is_dropout(key)
        if not any(part in key for part in _ELSEWHERE)
    }
