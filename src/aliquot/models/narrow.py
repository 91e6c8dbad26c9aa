"""A narrow copy of a model's configuration: the same class, switches and kinds of layers, with small numbers.

What holds for the code of a model can be tried for real on it within milliseconds, whatever the size of the model.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from aliquot.models.remote_code import without_code

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 128
WINDOW = 5
_WIDTH = 64
_OF_A_KIND = 2  # layers
_CAP = 1.0  # small enough to matter at the scores and logits of random weights

# What transformers' configurations call what is made small.
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


def narrow(config: PretrainedConfig, dropout: bool = True) -> PretrainedConfig:
    """A configuration of the same class. Two layers of each kind that its lists of layers tell apart, else four.

    `dropout` false: none.
    """
    values = _narrowed(config.to_dict())
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(key), dict):
            values[key] = _fewer_factors(values[key], values)
    return type(config).from_dict(values if dropout else _without_dropout(values))


def for_training(config: PretrainedConfig) -> PretrainedConfig:
    """A copy without what is for generation alone."""
    copied = copy.deepcopy(config)
    copied.use_cache = False
    if hasattr(copied, "rescale_every"):
        copied.rescale_every = 0  # RWKV would divide its weights in place for evaluation, against fp16's overflow
    return copied


def built(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """The model of a narrow configuration, for real, in fp32 on CPU. Raises whatever the model's code does."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = without_code(AutoModelForCausalLM.from_config)(
        for_training(config), dtype=torch.float32, attn_implementation=attention, experts_implementation="eager"
    )
    return model


def is_dropout(key: str) -> bool:
    """Whether a key of a configuration is how much is dropped, or blurred, at random in training."""
    of_a_head = key.startswith(("summary", "classifier"))  # which is no part of a language model
    return key.endswith(_DROPS) and not of_a_head


def has_dropout(config: PretrainedConfig) -> bool:
    return _some_dropout(config.to_dict())


def _some_dropout(values: dict[str, Any]) -> bool:
    inner = any(_some_dropout(value) for value in values.values() if isinstance(value, dict))
    return inner or any(
        is_dropout(str(key)) for key, value in values.items() if isinstance(value, float | int) and value > 0
    )


def _without_dropout(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_dropout(value) if isinstance(value, dict) else 0.0 if is_dropout(str(key)) and value else value
        for key, value in values.items()
    }


def _narrowed(values: dict[str, Any]) -> dict[str, Any]:
    layers = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), 0)
    lists = {key: value for key, value in values.items() if isinstance(value, list) and layers == len(value) > 0}
    kept = _positions(lists, layers)
    heads = next((values[name] for name in _HEADS if isinstance(values.get(name), int)), 0)
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in lists:
            found[key] = [_small(key, value[position], heads) for position in kept]
        elif key == "per_layer_config" and isinstance(value, dict):
            of_layer = {int(at): _narrowed(more) for at, more in value.items()}
            found[key] = {at: of_layer[position] for at, position in enumerate(kept) if position in of_layer}
        elif isinstance(value, dict) and key not in _NOT_NARROWED:
            found[key] = _narrowed(value)
        elif key in _LAYERS and isinstance(value, int):
            found[key] = len(kept)
        else:
            found[key] = _small(key, value, heads)
    return {**found, **_derived(values, found, len(kept))}


def _fewer_factors(rope: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters with as many factors (longrope) as a narrow head has frequencies; of kinds of layers, each."""
    heads = next((values[name] for name in _HEADS if isinstance(values.get(name), int)), 1)
    width = values.get("qk_rope_head_dim") or values.get("head_dim") or values.get("hidden_size", _WIDTH) // heads
    share = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    count = int(width * (1.0 if values.get("qk_rope_head_dim") else share)) // 2
    found: dict[str, Any] = {}
    for key, value in rope.items():
        if key in ("short_factor", "long_factor") and isinstance(value, list):
            found[key] = [value[at * len(value) // count] for at in range(count)]
        else:
            found[key] = _fewer_factors(value, values) if isinstance(value, dict) else value
    return found


def _positions(lists: dict[str, list[Any]], layers: int) -> list[int]:
    """Of the layers that are kept: the first ones of each kind, in order."""
    of_kind: dict[str, list[int]] = {}
    for position in range(layers):
        of_kind.setdefault(repr([each[position] for each in lists.values()]), []).append(position)
    most = _OF_A_KIND if len(of_kind) > 1 else 2 * _OF_A_KIND
    return sorted(position for positions in of_kind.values() for position in positions[:most])


def _small(key: str, value: Any, heads: int) -> Any:
    if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
        return [_small(key, each, heads) for each in value]
    if key.endswith(("softcapping", "softcap", "soft_cap", "clip_qkv")) and value:
        return _CAP
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if key.endswith(("_token_id", "_token_index", "mask_index")):
        return value if value < VOCABULARY else 3
    if key in _KEY_HEADS:
        return min(value, 4 if value == heads else 2)
    return min(value, _SIZE_OF[key]) if key in _SIZE_OF else value


def _derived(values: dict[str, Any], found: dict[str, Any], layers: int) -> dict[str, Any]:
    """What some configurations hold although other numbers of theirs fix it."""
    more: dict[str, Any] = {}
    width = found.get("hidden_size", _WIDTH)
    if "head_dim" in values and values["head_dim"] is None and "num_attention_heads" in found:
        more["head_dim"] = width // found["num_attention_heads"]
    if "qk_rope_head_dim" in values and values.get("head_dim") == values["qk_rope_head_dim"]:
        more["head_dim"] = found["qk_rope_head_dim"]
    if "expand" in values and "num_heads" in values:
        more["num_heads"] = values["expand"] * width // found["head_dim"]
    if values.get("attention_hidden_size"):
        inner = width * (values["attention_hidden_size"] // values["hidden_size"])
        more["attention_hidden_size"] = inner
        if "attention_head_dim" in values:
            more["attention_head_dim"] = inner // found["num_attention_heads"]
    if values.get("mamba_d_ssm"):
        more["mamba_d_ssm"] = found["mamba_n_heads"] * found["mamba_d_head"]
    if "mamba_headdim" in values:
        more["mamba_headdim"] = values["mamba_expand"] * width // values["n_mamba_heads"]
    if values.get("num_kv_shared_layers"):
        more["num_kv_shared_layers"] = layers // 2
    if isinstance(values.get("hybrid_layer_ids"), list):
        kinds = found.get("layers_block_type", [])
        more["hybrid_layer_ids"] = [at for at, kind in enumerate(kinds) if kind == "hybrid"]
    return more
