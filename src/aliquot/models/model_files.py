"""The small files beside the weights: config, generation config and tokenizer, for transformers 4.57 and 5 alike."""

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

# What training puts in front of a document, for `aliquot generate` and later training; beside a run's export its step.
CONVENTION_FILE = "aliquot.json"
_OF_LOADING = {"is_local", "local_files_only"}  # transformers writes how a tokenizer was found among what it is


def model_files(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | None,
    prefix: Sequence[int],
    chat_prefix: Sequence[int],
    ends: Sequence[int] = (),
) -> dict[str, bytes]:
    """File name -> content, for fp32 weights. The generation config is the one of `source`, if it has one; from
    scratch, special tokens are the tokenizer's. `prefix`: the ids before each document; `chat_prefix`: each chat;
    `ends`: the tokens that end learned answers.
    """
    saved = type(config).from_dict(config.to_dict())
    saved.dtype = torch.float32
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        save_tokenizer(tokenizer, Path(folder))
        files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
    special = {key: getattr(tokenizer, key) for key in SPECIAL if getattr(tokenizer, key) is not None}
    fields = parse_json(files["config.json"], "config.json")
    fields.pop("auto_map", None)  # names code, which is not beside it and was not what was trained
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
    """`files` with the tokens that end learned answers, which aliquot.json lists, in every `eos_token_id`.

    Programs that generate stop at those tokens; without them a base model that learned chats never stops.
    """
    from transformers import AutoConfig

    ends = parse_json(files.get(CONVENTION_FILE, b"{}"), CONVENTION_FILE).get("ends") or []
    config = parse_json(files["config.json"], "config.json")
    generation: dict[str, Any] | None = {key: config[key] for key in SPECIAL if config.get(key) is not None}
    if "generation_config.json" in files:
        generation = None
        with suppress(UserError):  # of somebody else: nothing here depends on it
            generation = parse_json(files["generation_config.json"], "generation_config.json")
    changed = dict(files)
    if generation is not None and (ids := joined_ends(generation.get("eos_token_id"), ends)) is not None:
        changed["generation_config.json"] = _json(generation | {"eos_token_id": ids})
    if (ids := joined_ends(config.get("eos_token_id"), ends)) is not None:
        with suppress(Exception):  # a few configuration classes take one number alone
            AutoConfig.for_model(config["model_type"], eos_token_id=ids)
            changed["config.json"] = _json(config | {"eos_token_id": ids})
    return changed


def joined_ends(eos: Any, ends: Sequence[int]) -> int | list[int] | None:
    """`eos`, a token, a list of tokens or None, with `ends`; None: `eos` has them all."""
    before = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ids = list(dict.fromkeys([*before, *ends]))
    return None if ids == before else ids[0] if len(ids) == 1 else ids


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Its files, none of them in folders: of several chat templates transformers would make one. They do not depend on
    where it came from, nor on whether a hub might have been asked."""
    tokenizer.save_pretrained(directory, save_jinja_files=not isinstance(tokenizer.chat_template, dict))
    file = directory / "tokenizer_config.json"
    fields = read_json(file)
    if _OF_LOADING & fields.keys():
        file.write_bytes(_json({key: value for key, value in fields.items() if key not in _OF_LOADING}))


def trained_prefix(directory: Path, key: Literal["prefix", "chat_prefix"] = "prefix") -> list[int] | None:
    """What the training of an exported model put before each document, or each chat; None: nothing says so."""
    return _trained_tokens(directory, key)


def trained_ends(directory: Path) -> list[int]:
    """The tokens that end learned answers of an exported model or adapter."""
    return _trained_tokens(directory, "ends") or []


def _trained_tokens(directory: Path, key: str) -> list[int] | None:
    file = directory / CONVENTION_FILE
    if not file.is_file():
        return None
    tokens = read_json(file).get(key)
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None


def of_step(files: Mapping[str, bytes], step: int) -> dict[str, bytes]:
    """`files`, to lie beside the weights that a run had after `step`, and to say so."""
    told = parse_json(files[CONVENTION_FILE], CONVENTION_FILE)
    return {**files, CONVENTION_FILE: _json({**told, "step": step})}


def exported_step(directory: Path) -> int | None:
    """After which step a run had the weights that it has exported; None: there is no export, or it does not say so."""
    try:
        step = read_json(directory / CONVENTION_FILE).get("step")
    except UserError:
        return None
    return step if isinstance(step, int) else None


def export_dtype(wanted: str, stored: torch.dtype | None, precision: str) -> torch.dtype:
    """What `model.dtype` means. auto: as the source stores its weights, or, where that is none that models are used in,
    the one trained in.
    """
    if wanted != "auto":
        named: torch.dtype = getattr(torch, wanted)
        return named
    if stored in (torch.float32, torch.bfloat16, torch.float16):
        return stored
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _known_class(fields: dict[str, Any]) -> dict[str, Any]:
    """transformers 4 does not know what version 5 calls a tokenizer that is nothing but its tokenizer.json."""
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    return fields


def _json(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()
