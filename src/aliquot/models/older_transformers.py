"""Write a config.json that transformers 4.57 reads as version 5 does: renamed keys stand under both names.

Version 4 uses a default for a missing key: the model would load without a warning and compute something else. `pytest
-m long tests/models/test_older_transformers.py` compares the logits of all types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By model type: names in version 4 of keys of the config, or of its rope_parameters.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "gpt_neox": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "gpt_neox_japanese": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}
# By model type: kinds of layers under the names of version 4, which version 5 reads, too.
_KINDS: Mapping[str, Mapping[str, str]] = {
    "granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"},
    "zamba": {"linear_attention": "mamba"},
    "zamba2": {"linear_attention": "mamba"},
}
# Model types whose rope_scaling applies to layers with full attention alone, in both versions.
_SCALES_WHOLE = ("gemma3_text", "olmo3")
_UNLIKE = "its code computes other numbers than that of version 5"
_WITHOUT_KERNELS = "without CUDA kernels its code computes other numbers than that of version 5"
# Model types that version 4.57 computes differently, whatever the files say.
_CANNOT: Mapping[str, str] = {
    "apertus": _UNLIKE,
    "mamba2": _WITHOUT_KERNELS,
    "modernbert-decoder": _UNLIKE,
    "moshi": _UNLIKE,
    "recurrent_gemma": _UNLIKE,
    "xlstm": "its code fails there",
    "zamba2": _WITHOUT_KERNELS,
}


def older_transformers(model_type: str) -> str | None:
    """Return a warning about an export of a type that transformers 4.57 reads differently from version 5.

    None if version 4.57 reads the type alike or does not know it.
    """
    why = _CANNOT.get(model_type)
    return None if why is None else f"transformers 4 does not read this {model_type} export as version 5 does: {why}"


def with_old_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the `fields` of a config.json with the names of transformers 4.57 added."""
    fields = {key: _plain_floats(value) for key, value in _with_old_rope(fields).items()}
    model_type = str(fields.get("model_type"))
    for old, new in _KEYS.get(model_type, {}).items():
        if old not in fields and new in fields:
            fields[old] = fields[new]
    kinds = _KINDS.get(model_type, {})
    for key in ("layer_types", "layers_block_type"):
        if kinds and isinstance(fields.get(key), list):
            fields[key] = [kinds.get(kind, kind) for kind in fields[key]]
    return fields


def _plain_floats(value: Any) -> Any:
    """Write infinities as `Infinity`, which both versions read, instead of {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_plain_floats(item) for item in value]
    if isinstance(value, dict):
        return (
            float(value["__float__"])
            if value.keys() == {"__float__"}
            else {k: _plain_floats(v) for k, v in value.items()}
        )
    return value


def _with_old_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Add the names of transformers 4 for the numbers of the rotary embedding."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict):
        return fields
    local = rope.get("sliding_attention")
    whole = rope.get("full_attention") if isinstance(rope.get("full_attention"), dict) else rope
    if not isinstance(whole, dict) or "rope_theta" not in whole:
        return fields
    old: dict[str, Any] = {"rope_theta": whole["rope_theta"]}
    if isinstance(local, dict) and "rope_theta" in local:
        old["rope_local_base_freq"] = local["rope_theta"]
    if "partial_rotary_factor" in whole:
        old["partial_rotary_factor"] = whole["partial_rotary_factor"]
    scaling = {key: value for key, value in whole.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if scaling.get("rope_type", "default") != "default" and (
        whole is rope or fields.get("model_type") in _SCALES_WHOLE
    ):
        old["rope_scaling"] = {**scaling, "rope_theta": whole["rope_theta"]}
    return old | fields
