"""Write the small files of a model: config, generation config and tokenizer, for transformers 4.57 and 5."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from aliquot.core.errors import UserError
from aliquot.models.older_transformers import with_old_names
from aliquot.models.source import SPECIAL
from aliquot.tensor_io.jsonfile import parse_json, read_json, read_small

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Token ids before each document, for `aliquot generate` and later training; in the export of a run also the step.
CONVENTION_FILE = "aliquot.json"
_OF_LOADING = {"is_local", "local_files_only"}  # transformers saves where a tokenizer was loaded from


def model_files(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | None,
    prefix: Sequence[int],
    chat_prefix: Sequence[int],
    ends: Sequence[int] = (),
) -> dict[str, bytes]:
    """Return file name -> content, for fp32 weights.

    Args:
        source: the directory whose generation config is kept; None from scratch: special tokens of the tokenizer.
        prefix: token ids before each document.
        chat_prefix: token ids before each chat.
        ends: tokens that end learned answers.
    """
    saved = type(config).from_dict(config.to_dict())
    saved.dtype = torch.float32
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        save_tokenizer(tokenizer, Path(folder))
        files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
    special = {key: getattr(tokenizer, key) for key in SPECIAL if getattr(tokenizer, key) is not None}
    fields = parse_json(files["config.json"], "config.json")
    fields.pop("auto_map", None)  # names Python code that is not exported and was not trained
    if source is None:
        fields |= special
        files["generation_config.json"] = _json(special)
    elif (source / "generation_config.json").is_file():
        data = read_small(source / "generation_config.json")
        parse_json(data, source / "generation_config.json")
        files["generation_config.json"] = data
    files["config.json"] = _json(with_old_names(fields))
    files["tokenizer_config.json"] = _json(_known_class(parse_json(files["tokenizer_config.json"], "tokenizer_config")))
    files[CONVENTION_FILE] = _json({"prefix": list(prefix), "chat_prefix": list(chat_prefix), "ends": list(ends)})
    return with_ends(files)


def with_ends(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return `files` with the ends of learned answers, which aliquot.json lists, in every `eos_token_id`.

    Programs that generate stop at these tokens; otherwise a base model trained on chats would never stop.
    """
    from transformers import AutoConfig

    ends = parse_json(files.get(CONVENTION_FILE, b"{}"), CONVENTION_FILE).get("ends") or []
    config = parse_json(files["config.json"], "config.json")
    generation: dict[str, Any] | None = {key: config[key] for key in SPECIAL if config.get(key) is not None}
    if "generation_config.json" in files:
        generation = None
        with suppress(UserError):  # a broken file of the source model stays as it is
            generation = parse_json(files["generation_config.json"], "generation_config.json")
    changed = dict(files)
    if generation is not None and (ids := joined_ends(generation.get("eos_token_id"), ends)) is not None:
        changed["generation_config.json"] = _json(generation | {"eos_token_id": ids})
    if (ids := joined_ends(config.get("eos_token_id"), ends)) is not None:
        with suppress(Exception):  # some configuration classes accept a single number only
            AutoConfig.for_model(config["model_type"], eos_token_id=ids)
            changed["config.json"] = _json(config | {"eos_token_id": ids})
    return changed


def joined_ends(eos: Any, ends: Sequence[int]) -> int | list[int] | None:
    """Join `eos` (a token, a list of tokens or None) and `ends`; None if `eos` has all of them."""
    before = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ids = list(dict.fromkeys([*before, *ends]))
    return None if ids == before else ids[0] if len(ids) == 1 else ids


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Save a tokenizer without subdirectories, in which transformers would put several chat templates.

    The files do not depend on the place that the tokenizer was loaded from.
    """
    tokenizer.save_pretrained(directory, save_jinja_files=not isinstance(tokenizer.chat_template, dict))
    file = directory / "tokenizer_config.json"
    fields = read_json(file)
    if _OF_LOADING & fields.keys():
        file.write_bytes(_json({key: value for key, value in fields.items() if key not in _OF_LOADING}))


def trained_prefix(directory: Path, key: Literal["prefix", "chat_prefix"] = "prefix") -> list[int] | None:
    """Return the token ids before each document, or each chat, in the training of a model; None if unknown."""
    return _trained_tokens(directory, key)


def trained_ends(directory: Path) -> list[int]:
    """Return the tokens that end learned answers of an exported model or adapter."""
    return _trained_tokens(directory, "ends") or []


def _trained_tokens(directory: Path, key: str) -> list[int] | None:
    file = directory / CONVENTION_FILE
    if not file.is_file():
        return None
    tokens = read_json(file).get(key)
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None


def with_step(files: Mapping[str, bytes], step: int) -> dict[str, bytes]:
    """Return `files` with the `step` after which a run had the weights next to them."""
    fields = parse_json(files[CONVENTION_FILE], CONVENTION_FILE)
    return {**files, CONVENTION_FILE: _json({**fields, "step": step})}


def exported_step(directory: Path) -> int | None:
    """Return the step of the exported weights; None without an export or without its step."""
    try:
        step = read_json(directory / CONVENTION_FILE).get("step")
    except UserError:
        return None
    return step if isinstance(step, int) else None


def export_dtype(setting: str, stored: torch.dtype | None, precision: str) -> torch.dtype:
    """Return the dtype that `model.dtype` sets. `auto`: the dtype of the source, or, if it is unusual, of training."""
    if setting != "auto":
        named: torch.dtype = getattr(torch, setting)
        return named
    if stored in (torch.float32, torch.bfloat16, torch.float16):
        return stored
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _known_class(fields: dict[str, Any]) -> dict[str, Any]:
    """Rename the tokenizer class of version 5 that transformers 4 does not know."""
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    return fields


def _json(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()
