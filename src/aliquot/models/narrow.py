"""Make a narrow copy of a model's configuration: the same class, flags and kinds of layers, with small sizes.

A narrow copy shows within milliseconds how the code of a model behaves, whatever the size of the model.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from aliquot.models.untrusted_code import model_from_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from aliquot.config.adapter_section import AdapterSection

VOCABULARY = 128
WINDOW = 5
_WIDTH = 64
_LAYERS_OF_A_KIND = 2
_CAP = 1.0  # of soft-caps and clipping: small enough to change the attention scores and logits of random weights

# Sizes in a narrow copy, each with the keys of transformers configurations that get the size.
_SIZES = {
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size"
    " ngram_vocab_size_base unpadded_vocab_size",
    _WIDTH: "hidden_size d_model n_embd dim_model emb_dim embedding_dim embed_dim word_embed_proj_dim lru_width"
    " input_embedding_size output_embedding_size",
    96: "intermediate_size ffn_dim n_inner dff dim_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim d_inner"
    " intermediate_size_mlp shared_intermediate_size shared_expert_intermediate_size feed_forward_size"
    " shared_experts_intermediate_size dense_intermediate_size moe_shared_expert_intermediate_size",
    32: "moe_intermediate_size expert_ffn_hidden_size embedding_size",
    16: "head_dim mamba_d_head mamba_head_dim dim_head kv_channels v_head_dim qk_head_dim global_head_dim swa_head_dim"
    " swa_v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim d_head attention_head_size q_lora_rank"
    " kv_lora_rank o_lora_rank query_pre_attn_scalar hidden_size_per_layer_input laurel_rank mamba_dt_rank"
    " time_step_rank max_window_layers adapter_rank router_hidden_size hc_lowrank ple_embed_dim index_head_dim",
    8: "qk_nope_head_dim qk_rope_head_dim rotary_dim mamba_d_state state_size ssm_state_size chunk_size"
    " mamba_chunk_size prompt_length mamba_n_heads mamba_num_heads index_topk",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads swa_num_attention_heads"
    " encoder_attention_heads linear_num_value_heads linear_num_heads num_experts num_local_experts n_routed_experts"
    " moe_num_experts num_encoder_attention_heads num_decoder_attention_heads index_n_heads floor_scale",
    WINDOW: "sliding_window sliding_window_size local_attention window_size attention_window_size attention_chunk_size",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads n_group num_expert_group n_groups"
    " o_groups zero_expert_num",
    1: "topk_group",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks",
    "num_encoder_layers", "num_decoder_layers",
)  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads", "num_query_groups")
_DROPS = ("dropout", "pdrop", "dropout_prob", "layerdrop", "drop_rate", "jitter_noise")
_NOT_NARROWED = ("rope_parameters", "rope_scaling", "id2label", "label2id")


def narrow(config: PretrainedConfig) -> PretrainedConfig:
    """Return a narrow copy of `config`.

    If `config` distinguishes kinds of layers by lists such as `layer_types`, the copy has two layers of each kind.
    Otherwise it has four layers.
    """
    values = _narrowed(config.to_dict())
    ropes = [key for key in ("rope_parameters", "rope_scaling") if isinstance(values.get(key), dict)]
    return type(config).from_dict(values | {key: _fewer_factors(values[key], values) for key in ropes})


def for_training(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of `config` without settings that are only for generation."""
    copied = copy.deepcopy(config)
    copied.use_cache = False
    if hasattr(copied, "rescale_every"):
        copied.rescale_every = 0  # otherwise RWKV divides its weights in place in evaluation, against fp16 overflow
    return copied


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of `config` without dropout, also in its inner configurations."""
    return type(config).from_dict(_without_dropout(config.to_dict()))


def built(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Build the model of a narrow configuration, in fp32 on the CPU. The model's code may raise any exception."""
    import torch

    return model_from_config(
        for_training(config), dtype=torch.float32, attn_implementation=attention, experts_implementation="eager"
    )


def is_dropout(key: str) -> bool:
    """Return whether a configuration key is a rate of dropout or of another random noise in training.

    Keys of heads for other tasks (summary, classification) do not count.
    """
    return key.endswith(_DROPS) and not key.startswith(("summary", "classifier"))


def has_dropout(config: PretrainedConfig, adapter: AdapterSection | None = None) -> bool:
    """Return whether a configuration or an adapter sets any dropout rate above 0."""
    values = config.to_dict()
    return _without_dropout(values) != values or (adapter is not None and adapter.dropout > 0)


def _without_dropout(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_dropout(value) if isinstance(value, dict) else 0.0 if is_dropout(str(key)) and value else value
        for key, value in values.items()
    }


def _narrowed(values: dict[str, Any]) -> dict[str, Any]:
    layers = _first(values, _LAYERS, 0)
    lists = {key: value for key, value in values.items() if isinstance(value, list) and layers == len(value) > 0}
    positions = _positions(lists, layers)
    heads = _first(values, _HEADS, 0)
    narrow_values: dict[str, Any] = {}
    for key, value in values.items():
        if key in lists:
            narrow_values[key] = [_small(key, value[position], heads) for position in positions]
        elif key == "per_layer_config" and isinstance(value, dict):
            layer_configs = {int(at): _narrowed(layer_values) for at, layer_values in value.items()}
            narrow_values[key] = {
                at: layer_configs[position] for at, position in enumerate(positions) if position in layer_configs
            }
        elif isinstance(value, dict) and key not in _NOT_NARROWED:
            narrow_values[key] = _narrowed(value)
        else:
            is_count = key in _LAYERS and isinstance(value, int)
            narrow_values[key] = len(positions) if is_count else _small(key, value, heads)
    return {**narrow_values, **_derived(values, narrow_values, len(positions))}


def _first(values: dict[str, Any], names: tuple[str, ...], default: int) -> int:
    return next((value for name in names if isinstance(value := values.get(name), int)), default)


def _fewer_factors(rope: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters whose lists of factors (longrope) have one factor per frequency of a narrow head."""
    width = (
        values.get("qk_rope_head_dim")
        or values.get("head_dim")
        or values.get("hidden_size", _WIDTH) // _first(values, _HEADS, 1)
    )
    share = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    count = int(width * (1.0 if values.get("qk_rope_head_dim") else share)) // 2
    narrow_rope: dict[str, Any] = {}
    for key, value in rope.items():
        if key in ("short_factor", "long_factor") and isinstance(value, list):
            narrow_rope[key] = [value[at * len(value) // count] for at in range(count)]
        else:
            narrow_rope[key] = _fewer_factors(value, values) if isinstance(value, dict) else value
    return narrow_rope


def _positions(lists: dict[str, list[Any]], layers: int) -> list[int]:
    """Return the sorted indices of the first layers of each kind; layers that agree in all `lists` are one kind."""
    positions_of_kind: dict[str, list[int]] = {}
    for position in range(layers):
        positions_of_kind.setdefault(repr([values[position] for values in lists.values()]), []).append(position)
    limit = _LAYERS_OF_A_KIND if len(positions_of_kind) > 1 else 2 * _LAYERS_OF_A_KIND
    return sorted(position for positions in positions_of_kind.values() for position in positions[:limit])


def _small(key: str, value: Any, heads: int) -> Any:
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return [_small(key, item, heads) for item in value]
    if key.endswith(("softcapping", "softcap", "soft_cap", "clip_qkv")) and value:
        return _CAP
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if key.endswith(("_token_id", "_token_index", "mask_index")):
        return value if value < VOCABULARY else 3
    if key in _KEY_HEADS:
        return min(value, 4 if value == heads else 2)
    return min(value, _SIZE_OF[key]) if key in _SIZE_OF else value


def _derived(values: dict[str, Any], narrow_values: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the values of a narrow configuration that must be consistent with its other values."""
    derived: dict[str, Any] = {}
    width = narrow_values.get("hidden_size", _WIDTH)
    if "head_dim" in values and values["head_dim"] is None and "num_attention_heads" in narrow_values:
        derived["head_dim"] = width // narrow_values["num_attention_heads"]
    if "qk_rope_head_dim" in values and values.get("head_dim") == values["qk_rope_head_dim"]:
        derived["head_dim"] = narrow_values["qk_rope_head_dim"]
    if "expand" in values and "num_heads" in values:
        derived["num_heads"] = values["expand"] * width // narrow_values["head_dim"]
    if values.get("attention_hidden_size"):
        inner = width * (values["attention_hidden_size"] // values["hidden_size"])
        derived["attention_hidden_size"] = inner
        if "attention_head_dim" in values:
            derived["attention_head_dim"] = inner // narrow_values["num_attention_heads"]
    if values.get("mamba_d_ssm"):
        derived["mamba_d_ssm"] = narrow_values["mamba_n_heads"] * narrow_values["mamba_d_head"]
    if "mamba_headdim" in values:
        derived["mamba_headdim"] = values["mamba_expand"] * width // values["n_mamba_heads"]
    if values.get("num_kv_shared_layers"):
        derived["num_kv_shared_layers"] = layers // 2
    if isinstance(values.get("hybrid_layer_ids"), list):
        kinds = narrow_values.get("layers_block_type", [])
        derived["hybrid_layer_ids"] = [at for at, kind in enumerate(kinds) if kind == "hybrid"]
    return derived
