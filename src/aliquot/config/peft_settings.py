"""The settings of an adapter that peft, or a run with an `adapter` section, has saved: its adapter_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aliquot.config.home import looks_local, with_home
from aliquot.core.decode import read_json_object
from aliquot.core.errors import ConfigError, ModelFilesError

CONFIG_FILE = "adapter_config.json"
_NAMES = {
    "r": "r", "lora_alpha": "alpha", "target_modules": "target_modules", "use_rslora": "use_rslora",
    "lora_dropout": "dropout",
}  # fmt: skip
# What makes something else of it than two matrices beside each adapted one.
_OTHERS = (
    "use_dora", "use_qalora", "lora_bias", "modules_to_save", "layers_to_transform", "exclude_modules", "rank_pattern",
    "alpha_pattern", "target_parameters", "trainable_token_indices", "layer_replication", "alora_invocation_tokens",
)  # fmt: skip
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")  # as ways to begin


def adapter_settings(directory: Path) -> dict[str, Any]:
    """Those in `directory` by the keys of the `adapter` section. Raises UserError where they are none of plain LoRA."""
    fields = _fields(directory)
    others = [key for key in _OTHERS if fields.get(key)]
    others += ["bias"] if fields.get("bias", "none") != "none" else []
    others += ["init_lora_weights"] if str(fields.get("init_lora_weights")).startswith(_CHANGE_THE_BASE) else []
    if fields.get("peft_type") != "LORA" or others:
        what = f"it has {others[0]}" if others else f"peft_type is {fields.get('peft_type')}"
        raise ConfigError(
            f"not an adapter of the plain kind: {what}, and adapter.type is lora", directory / CONFIG_FILE
        )
    modules = fields.get("target_modules")
    if isinstance(modules, str) and modules != "all-linear":
        raise ConfigError(
            f"target_modules is the pattern {modules!r}: write the names that it finds as a list there",
            directory / CONFIG_FILE,
        )
    return {ours: fields[theirs] for theirs, ours in _NAMES.items() if theirs in fields}


def model_beside(directory: Path, base: str | None = None) -> str:
    """The model that the adapter in `directory` is for: `base`, else the one that its configuration names.

    Raises UserError where neither says it, and where that model has moved.
    """
    if base is not None:
        return base
    name = _fields(directory).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConfigError("base_model_name_or_path does not say which model it is for", directory / CONFIG_FILE)
    if looks_local(name) and not with_home(name).is_dir():
        raise ModelFilesError(
            f"base_model_name_or_path names the model {name}, which is not there: say where it is now by --base",
            directory / CONFIG_FILE,
        )
    return name


def _fields(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG_FILE
    try:
        return read_json_object(file)
    except FileNotFoundError:
        raise ConfigError(
            f"no {CONFIG_FILE} here: give a directory that peft or a run with an adapter has saved", directory
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(error), file) from None
