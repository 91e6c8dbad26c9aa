"""The `adapter` section, which trains a LoRA adapter on a frozen model, and the reader of adapter_config.json files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from aliquot.config.section import PATH, Section, refuse
from aliquot.core.decode import read_json_object
from aliquot.core.errors import ConfigError, ModelFilesError, UserError
from aliquot.core.small_files import looks_local, with_home

ADAPTER_CONFIG = "adapter_config.json"
_PEFT_NAMES = {
    "r": "r", "lora_alpha": "alpha", "target_modules": "target_modules", "use_rslora": "use_rslora",
    "lora_dropout": "dropout",
}  # fmt: skip
# Settings of peft with which an adapter is more than two matrices for each adapted layer.
_UNSUPPORTED = (
    "use_dora", "use_qalora", "lora_bias", "modules_to_save", "layers_to_transform", "exclude_modules", "rank_pattern",
    "alpha_pattern", "trainable_token_indices", "layer_replication", "alora_invocation_tokens",
)  # fmt: skip
_EXPERT_WEIGHTS = {"up_proj", "down_proj"}  # or gate_up_proj
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")  # values of init_lora_weights


class AdapterSection(Section):
    type: Literal["lora"] = "lora"
    """LoRA, through peft: pip install 'aliquot[lora]'."""
    path: Annotated[str | None, PATH] = None
    """Begin with the adapter in this directory, saved by peft or a run; its r, alpha and so on apply."""
    r: PositiveInt = 16
    """Rank of the two matrices of each adapted layer."""
    alpha: PositiveFloat = 32.0
    """Their product is scaled by alpha / r."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Of their input, in training."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers, by the end of their names; all-linear: all but the output head and experts, see `experts`."""
    experts: bool = False
    """Adapt the weights of all experts of a mixture, too (peft's target_parameters)."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead."""
    base: Literal["bf16", "int8", "nf4"] = "bf16"
    """Format of the frozen layers in memory. nf4: 4 bits, as in QLoRA. int8: 8 bits, by row. bf16: not
    compressed. int8 and nf4 need engine host or fsdp; embeddings, output head, norms and routers stay as they are."""
    loraplus_lr_ratio: PositiveFloat = 1.0
    """LoRA+: the second matrix, B, learns with train.learning_rate times this ratio."""

    @property
    def directory(self) -> Path | None:
        """Return the directory of the adapter with which training begins, or None."""
        return None if self.path is None else with_home(self.path)

    @model_validator(mode="after")
    def check_experts(self) -> Self:
        refuse(
            (
                self.experts and self.dropout,
                "adapter.dropout has no meaning for experts, whose rows it cannot reach: set it to 0",
            )
        )
        return self

    @model_validator(mode="before")
    @classmethod
    def fill_from_saved_adapter(cls, values: Any) -> Any:
        """Fill unset keys from the adapter saved at `path`. Raises ValueError for keys that contradict the adapter."""
        if not isinstance(values, dict) or not isinstance(values.get("path"), str):
            return values
        if {"r", "alpha", "target_modules"} <= values.keys() and not with_home(values["path"]).is_dir():
            return values  # a run's own config.yaml sets all keys: the directory is needed when the adapter is loaded
        try:
            saved = adapter_settings(with_home(values["path"]))
        except UserError as error:
            raise ValueError(str(error)) from None
        for key in saved.keys() & values.keys() - {"dropout"}:
            if _comparable(values[key]) != _comparable(saved[key]) and values[key] != "all-linear":
                raise ValueError(
                    f"adapter.{key} is {values[key]}, but the adapter at adapter.path has {saved[key]}: leave the key"
                    " out"
                )
        return saved | values


def _comparable(value: Any) -> Any:
    """Return a list sorted, because the order of layer names has no meaning, and any other value unchanged."""
    return sorted(value) if isinstance(value, list) else value


def adapter_settings(directory: Path) -> dict[str, Any]:
    """Return the settings of a saved adapter, under the names of the keys in the `adapter` section.

    Raises UserError if the directory has no adapter, or an adapter that is not plain LoRA.
    """
    fields = _read_fields(directory)
    unsupported = [key for key in _UNSUPPORTED if fields.get(key)]
    unsupported += ["bias"] if fields.get("bias", "none") != "none" else []
    unsupported += ["init_lora_weights"] if str(fields.get("init_lora_weights")).startswith(_CHANGE_THE_BASE) else []
    file = directory / ADAPTER_CONFIG
    if fields.get("peft_type") != "LORA" or unsupported:
        reason = f"it has {unsupported[0]}" if unsupported else f"peft_type is {fields.get('peft_type')}"
        raise ConfigError(f"not a plain LoRA adapter: {reason}", file)
    modules = fields.get("target_modules")
    if isinstance(modules, str) and modules != "all-linear":
        raise ConfigError(
            f"target_modules is the pattern {modules!r}: write the list of the matching names instead", file
        )
    parameters = fields.get("target_parameters") or []
    if parameters and {name.rpartition(".")[2].removeprefix("gate_") for name in parameters} != _EXPERT_WEIGHTS:
        raise ConfigError(f"target_parameters is {parameters}: only both weights of experts can be adapted", file)
    settings = {key: fields[peft_key] for peft_key, key in _PEFT_NAMES.items() if peft_key in fields}
    return settings | {"experts": bool(parameters)}


def adapter_base_model(directory: Path, base: str | None = None) -> str:
    """Return the directory or hub id of an adapter's base model.

    This is `base` if it is set, else the model that adapter_config.json in `directory` names. Raises UserError if no
    model is named, or if the model is no longer at its path.
    """
    if base is not None:
        return base
    name = _read_fields(directory).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            "base_model_name_or_path is missing: name the base model with --base", directory / ADAPTER_CONFIG
        )
    if looks_local(name) and not with_home(name).is_dir():
        raise ModelFilesError(
            f"base_model_name_or_path names the model {name}, which does not exist: give its new directory with --base",
            directory / ADAPTER_CONFIG,
        )
    return name


def _read_fields(directory: Path) -> dict[str, Any]:
    file = directory / ADAPTER_CONFIG
    try:
        return read_json_object(file)
    except FileNotFoundError:
        raise ConfigError(
            f"no {ADAPTER_CONFIG} here: give a directory that peft or a run with an adapter has saved", directory
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(error), file) from None
