"""Write the small files of a model: config, generation config and tokenizer, for transformers 4.57 and 5.

transformers 4 replaces a missing key of config.json by a default: the model would load without a warning and compute
wrong logits. Keys that transformers 5 has renamed are therefore written under both names.
`pytest -m long tests/models/test_model_files.py` compares the logits of all model types.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from aliquot.core.decode import parse_json, read_json, read_small
from aliquot.core.errors import UserError
from aliquot.models.model_config import with_floats
from aliquot.models.source import SPECIAL

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# The file with the token ids that training put before documents and chats and after answers. `aliquot generate` and
# later training read the file. In the export of a run the file also has the step of the weights.
CONVENTION_FILE = "aliquot.json"
_OF_LOADING = {"is_local", "local_files_only"}  # keys in which transformers saves where it loaded a tokenizer from
# By model type: config keys (or keys of rope_parameters) of transformers 4 -> their names in transformers 5.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {"n_ctx": "n_positions"},  # for llama.cpp; transformers does not use this key
    "gpt_neox": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "gpt_neox_japanese": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}
# By model type: kinds of layers in transformers 5 -> their names in transformers 4, which version 5 reads, too.
_KINDS: Mapping[str, Mapping[str, str]] = {
    "granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"},
    "zamba": {"linear_attention": "mamba"},
    "zamba2": {"linear_attention": "mamba"},
}
# Model types whose rope_scaling applies only to layers with full attention, in transformers 4 and 5.
_SCALES_WHOLE = ("gemma3_text", "olmo3")
_UNLIKE = "its code computes other logits than the code of version 5"
_WITHOUT_KERNELS = "without CUDA kernels its code computes other logits than the code of version 5"
# Model types for which transformers 4.57 computes different logits than version 5, and the reasons. No file helps.
_CANNOT: Mapping[str, str] = {
    "apertus": _UNLIKE,
    "mamba2": _WITHOUT_KERNELS,
    "modernbert-decoder": _UNLIKE,
    "moshi": _UNLIKE,
    "recurrent_gemma": _UNLIKE,
    "xlstm": "its code fails there",
    "zamba2": _WITHOUT_KERNELS,
}


def model_files(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | None,
    prefix: Sequence[int],
    chat_prefix: Sequence[int],
    ends: Sequence[int] = (),
) -> dict[str, bytes]:
    """Return the small files of a model with fp32 weights: file name -> content.

    Args:
        source: the directory of the pretrained model, whose generation config is copied. None: the model is trained
            from scratch, and its generation config gets the special tokens of the tokenizer.
        prefix: token ids before each document.
        chat_prefix: token ids before each chat.
        ends: token ids that end the assistant messages of the training data.
    """
    saved = type(config).from_dict(config.to_dict())
    saved.dtype = torch.float32
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        save_tokenizer(tokenizer, Path(folder))
        files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
    special = {key: token for key in SPECIAL if (token := getattr(tokenizer, key)) is not None}
    fields = parse_json(files["config.json"], "config.json")
    fields.pop("auto_map", None)  # names Python code that is not exported and was not trained
    if source is None:
        fields |= special
        files["generation_config.json"] = json_bytes(special)
    elif (file := source / "generation_config.json").is_file():
        files[file.name] = read_small(file)
        parse_json(files[file.name], file)
    files["config.json"] = json_bytes(with_old_names(fields))
    tokenizer_fields = parse_json(files["tokenizer_config.json"], "tokenizer_config")
    if tokenizer_fields.get("tokenizer_class") == "TokenizersBackend":  # a class that transformers 4 does not know
        tokenizer_fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    files["tokenizer_config.json"] = json_bytes(tokenizer_fields)
    files[CONVENTION_FILE] = json_bytes({"prefix": list(prefix), "chat_prefix": list(chat_prefix), "ends": list(ends)})
    return with_ends(files)


def with_ends(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Add the tokens that end answers, listed as `ends` in aliquot.json, to every `eos_token_id` in `files`.

    Programs that generate stop at these tokens; otherwise a base model trained on chats would never stop.
    """
    from transformers import AutoConfig

    ends = parse_json(files.get(CONVENTION_FILE, b"{}"), CONVENTION_FILE).get("ends") or []
    config = parse_json(files["config.json"], "config.json")
    generation: dict[str, Any] | None = {key: config[key] for key in SPECIAL if config.get(key) is not None}
    if "generation_config.json" in files:
        generation = None
        with suppress(UserError):  # a malformed generation config of the pretrained model is not changed
            generation = parse_json(files["generation_config.json"], "generation_config.json")
    changed = dict(files)
    if generation is not None and (ids := joined_ends(generation.get("eos_token_id"), ends)) is not None:
        changed["generation_config.json"] = json_bytes(generation | {"eos_token_id": ids})
    if (ids := joined_ends(config.get("eos_token_id"), ends)) is not None:
        with suppress(Exception):  # some configuration classes accept a single number only
            AutoConfig.for_model(config["model_type"], eos_token_id=ids)
            changed["config.json"] = json_bytes(config | {"eos_token_id": ids})
    return changed


def joined_ends(eos: Any, ends: Sequence[int]) -> int | list[int] | None:
    """Return `eos` (a token, a list of tokens or None) together with `ends`; None if `eos` contains all of `ends`."""
    before = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ids = list(dict.fromkeys([*before, *ends]))
    return None if ids == before else ids[0] if len(ids) == 1 else ids


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Save a tokenizer as files without subdirectories.

    transformers would otherwise put several chat templates in a subdirectory. The files do not depend on the path that
    the tokenizer was loaded from.
    """
    tokenizer.save_pretrained(directory, save_jinja_files=not isinstance(tokenizer.chat_template, dict))
    file = directory / "tokenizer_config.json"
    fields = read_json(file)
    if _OF_LOADING & fields.keys():
        file.write_bytes(json_bytes({key: value for key, value in fields.items() if key not in _OF_LOADING}))


def trained_tokens(directory: Path, key: Literal["prefix", "chat_prefix", "ends"]) -> list[int] | None:
    """Return token ids that the training of the model or adapter in `directory` used; None if unknown.

    `prefix` are the token ids before each document, `chat_prefix` the token ids before each chat, and `ends` the
    tokens that end answers of the assistant.
    """
    file = directory / CONVENTION_FILE
    tokens = read_json(file).get(key) if file.is_file() else None
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None


def with_step(files: Mapping[str, bytes], step: int) -> dict[str, bytes]:
    """Return `files` with the optimizer step of the exported weights added to aliquot.json."""
    fields = parse_json(files[CONVENTION_FILE], CONVENTION_FILE)
    return {**files, CONVENTION_FILE: json_bytes({**fields, "step": step})}


def exported_step(directory: Path) -> int | None:
    """Return the optimizer step of the weights exported to `directory`; None if there is no export or no step."""
    try:
        step = read_json(directory / CONVENTION_FILE).get("step")
    except UserError:
        return None
    return step if isinstance(step, int) else None


def export_dtype(setting: str, stored: torch.dtype | None, precision: str) -> torch.dtype:
    """Return the dtype of an export, by the setting `model.dtype`.

    `auto` is the dtype of the pretrained model. For a model from scratch, or an unusual dtype, it is the dtype of
    training.
    """
    if setting != "auto":
        return cast("torch.dtype", getattr(torch, setting))
    if stored in (torch.float32, torch.bfloat16, torch.float16):
        return stored
    return torch.bfloat16 if precision == "bf16" else torch.float32


def json_bytes(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def older_transformers(model_type: str) -> str | None:
    """Return a warning if transformers 4.57 computes different logits than version 5 from exports of `model_type`."""
    why = _CANNOT.get(model_type)
    return None if why is None else f"transformers 4 does not read this {model_type} export as version 5 does: {why}"


def with_old_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the `fields` of a config.json, with the names of transformers 4.57 added for renamed keys."""
    fields = {key: with_floats(value) for key, value in _with_old_rope(fields).items()}
    model_type = str(fields.get("model_type"))
    fields = {old: fields[new] for old, new in _KEYS.get(model_type, {}).items() if new in fields} | fields
    kinds = _KINDS.get(model_type, {})
    lists = [key for key in ("layer_types", "layers_block_type") if kinds and isinstance(fields.get(key), list)]
    return fields | {key: [kinds.get(kind, kind) for kind in fields[key]] for key in lists}


def _with_old_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Add the settings of the rotary embedding under their names in transformers 4."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict):
        return fields
    local = rope.get("sliding_attention")
    whole = rope.get("full_attention") if isinstance(rope.get("full_attention"), dict) else rope
    if not isinstance(whole, dict) or "rope_theta" not in whole:
        return fields
    old = {key: whole[key] for key in ("rope_theta", "partial_rotary_factor") if key in whole}
    if isinstance(local, dict) and "rope_theta" in local:
        old["rope_local_base_freq"] = local["rope_theta"]
    scaling = {key: value for key, value in whole.items() if key not in old}
    if scaling.get("rope_type", "default") != "default" and (
        whole is rope or fields.get("model_type") in _SCALES_WHOLE
    ):
        old["rope_scaling"] = {**scaling, "rope_theta": whole["rope_theta"]}
    return old | fields
