"""Complete the DeepSpeed JSON in the run config with settings from the other sections of the run config."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from aliquot.config.deepspeed_json import AUTO, leaves
from aliquot.config.deepspeed_keys import RULES, rule_for
from aliquot.config.schema import RunConfig
from aliquot.core.errors import DeepspeedConfigError


def deepspeed_settings(config: RunConfig, world_size: int, hidden_size: int) -> tuple[dict[str, Any], list[str]]:
    """Return the complete settings for DeepSpeed, and log lines about honoured and overridden keys of the JSON.

    Raises UserError if train_batch_size of the JSON is not micro-batch x accumulation x `world_size`.
    """
    written = config.shard.deepspeed_config or {}
    _check_batch(written, config, world_size)
    explicit = _without_auto(written)
    zero = {**explicit.get("zero_optimization", {}), "stage": 3}
    automatic = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    written_zero = written.get("zero_optimization", {})
    zero |= {key: value for key, value in automatic.items() if written_zero.get(key) == AUTO}
    replaced = ("optimizer", "scheduler")  # by objects of this run
    result = {key: value for key, value in explicit.items() if key not in replaced and _fate(key) == "honoured"}
    for section in ("offload_optimizer", "offload_param"):
        if section in zero:
            zero[section] = {key: value for key, value in zero[section].items() if key != "nvme_path"}
    if config.shard.offload == "cpu":
        zero.setdefault("offload_optimizer", {"device": "cpu"})
        zero.setdefault("offload_param", {"device": "cpu"})
    result["zero_optimization"] = {k: v for k, v in zero.items() if _fate(f"zero_optimization.{k}") != "overridden"}
    # For DeepSpeed, every micro-batch is one sample. The engine tells DeepSpeed which micro-batch ends a step.
    result |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world_size}
    bf16 = {key: value for key, value in explicit.get("bf16", {}).items() if key != "immediate_grad_update"}
    result["bf16"] = {**bf16, "enabled": config.train.chosen_precision == "bf16"}
    result["steps_per_print"] = None
    # DeepSpeed's default is the dtype of the weights, in which a sum over many micro-batches or ranks is coarse.
    result.setdefault("communication_data_type", "fp32")
    result["data_types"] = {"grad_accum_dtype": "fp32", **result.get("data_types", {})}
    return result, _log_lines(written)


def offloads_optimizer(settings: Mapping[str, Any]) -> bool:
    """Whether master weights and moments are in host memory."""
    return bool(settings.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none") != "none")


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without "auto" values, which set nothing, and without sections that have only "auto" values."""
    explicit = {
        key: _without_auto(value) if isinstance(value, dict) and value else deepcopy(value)
        for key, value in values.items()
        if value != AUTO
    }
    return {key: value for key, value in explicit.items() if value != {} or values[key] == {}}


def _log_lines(deepspeed: Mapping[str, Any]) -> list[str]:
    paths = [path for path, _ in leaves(deepspeed)]
    overridden = [(path, rule) for path in paths if (rule := rule_for(path)) is not None and rule.kind == "overridden"]
    if not paths:
        return []
    lines = [f"DeepSpeed: {len(paths) - len(overridden)} keys of its JSON honoured, {len(overridden)} overridden"]
    return lines + [f"DeepSpeed: {path} is overridden: {rule.note}" for path, rule in overridden]


def _fate(path: str) -> str:
    """Return whether a key or section is honoured or overridden. A section counts as honoured if any of its keys is."""
    rule = rule_for(path)
    below = [RULES[key].kind for key in RULES if key.startswith(f"{path}.")]
    return rule.kind if rule is not None else ("honoured" if "honoured" in below else "overridden")


def _check_batch(deepspeed: Mapping[str, Any], config: RunConfig, world_size: int) -> None:
    """Check DeepSpeed's rule: train_batch_size = micro-batch x accumulation x ranks."""
    total = deepspeed.get("train_batch_size", AUTO)
    micro, steps = config.train.micro_batch_size, config.train.gradient_accumulation_steps
    if config.train.global_batch_size is not None:  # two of the three numbers are set
        return
    if total == AUTO or steps is None or total == micro * steps * world_size:
        return
    raise DeepspeedConfigError(
        f"shard.deepspeed_config: train_batch_size is {total}, but train_micro_batch_size_per_gpu {micro} x"
        f" gradient_accumulation_steps {steps} x {world_size} ranks is {micro * steps * world_size}"
    )
