"""Merge a DeepSpeed JSON into the config of a run: its values fill unset keys, and contradictions are errors."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from aliquot.config.deepspeed_keys import RULES, KeyRule, rule_for
from aliquot.config.key_locations import KeyPath, Location, key_lines
from aliquot.core.decode import BoundedLoader, TooDeepError, decode_json
from aliquot.core.errors import DeepspeedConfigError
from aliquot.core.small_files import with_home

AUTO = "auto"
_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_SIZES = ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
_CONFIG_KEY = ("shard", "deepspeed_config")
_OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
# Every dotted path that has keys below it.
_SECTIONS = {path[:dot] for path in RULES for dot in range(len(path)) if path[dot] == "."}

Locations = dict[KeyPath, Location]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


# Types of the values that this module or the planner computes with: (what is expected, a check of a value). The schema
# checks the values that fill the run config, and DeepSpeed checks all others.
_Type = tuple[str, Callable[[Any], bool]]
_SECTION: _Type = ("an object of settings, or leave it out", lambda value: isinstance(value, dict))
_NUMBER: _Type = ("a number", _is_number)
_TEXT: _Type = ("a name", lambda value: isinstance(value, str))
_ZERO_NUMBERS = (
    "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)  # fmt: skip
_TYPES: dict[str, _Type] = {
    "bf16.enabled": ("true or false", lambda value: isinstance(value, bool)),
    "optimizer.type": _TEXT,
    "optimizer.params.betas": (
        "two numbers, like [0.9, 0.999]",
        lambda value: isinstance(value, list) and len(value) == 2 and all(x == AUTO or _is_number(x) for x in value),
    ),
    "scheduler.type": _TEXT,
    **{f"{section}.device": ("cpu or none", lambda value: value in ("cpu", "none", "nvme")) for section in _OFFLOADS},
    **{f"{section}.nvme_path": ("a path", lambda x: x is None or isinstance(x, str)) for section in _OFFLOADS},
    **{f"zero_optimization.{key}": _NUMBER for key in _ZERO_NUMBERS},
}


def fill_from_deepspeed(values: dict[str, Any], locations: Locations) -> None:
    """Read the DeepSpeed JSON in `shard.deepspeed_config`, and copy the JSON's values to the equivalent unset keys.

    Changes `values`, the nested values of a run config. If `shard.deepspeed_config` is a path, the content of the file
    replaces the path. The locations of filled keys are added to `locations`.

    Raises UserError for a file that cannot be read, for a key that is unknown or rejected, and for a value that
    contradicts the run config. The message about a contradiction names both places.
    """
    shard = values.get("shard")
    setting = shard.get("deepspeed_config") if isinstance(shard, dict) else None
    if setting is None:
        return
    if isinstance(setting, str):
        deepspeed = _read(with_home(setting), locations)
        values["shard"]["deepspeed_config"] = deepspeed
    elif isinstance(setting, dict):
        deepspeed = setting
    else:
        raise DeepspeedConfigError("shard.deepspeed_config is the path of a DeepSpeed JSON", locations.get(_CONFIG_KEY))
    if values.get("train") is None:
        values["train"] = {}
    train = values["train"]
    if not isinstance(train, dict):  # the schema reports it
        return
    for path, trouble in _problems(deepspeed, train):
        raise DeepspeedConfigError(f"{_place(path, locations)}: {path} {trouble}")
    filled = set()
    for path, filled_key, value in _equivalents(deepspeed):
        section, _, key = filled_key.partition(".")
        place = _place(path, locations)
        # A null counts as not set: the complete config that a run saves has a null for every such key.
        earlier = None if train.get(key) is None else locations.get((section, key), "the run config")
        if earlier is not None and train[key] != value:
            raise DeepspeedConfigError(
                f"{place}: {path} is {value!r}, but {section}.{key} is {train[key]!r} at {earlier}: leave one out"
            )
        if earlier is None:
            train[key] = value
            locations[section, key] = place
            filled.add(key)
    _check_batch_sizes(train, filled, deepspeed, locations)


def _read(path: Path, locations: Locations) -> dict[str, Any]:
    place = locations.get(_CONFIG_KEY, "shard.deepspeed_config")
    try:
        text = path.read_text(encoding="utf-8")
        settings = decode_json(text)
    except json.JSONDecodeError as error:
        raise DeepspeedConfigError(f"not valid JSON: {error.msg}", f"{path}:{error.lineno}") from None
    except TooDeepError as error:
        raise DeepspeedConfigError(str(error), str(path)) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, NUL in the name, a number of thousands of digits
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise DeepspeedConfigError(f"{place}: cannot read {path}: {reason}") from None
    if not isinstance(settings, dict):
        raise DeepspeedConfigError("a DeepSpeed config is an object of settings", str(path))
    try:
        for keys, line in key_lines(yaml.compose(text, Loader=BoundedLoader), _CONFIG_KEY):
            locations[keys] = f"{path}:{line}"
    except yaml.YAMLError:  # tabs, which YAML does not allow: errors name the file without a line
        locations[_CONFIG_KEY] = str(path)
    return settings


def _place(path: str, locations: Locations) -> str:
    return locations.get((*_CONFIG_KEY, *path.split(".")), locations.get(_CONFIG_KEY, "shard.deepspeed_config"))


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for every value in nested settings, except for sections with keys."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


Problem = tuple[str, str]  # a dotted path, and the trouble with its value


def _type_problems(values: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Yield each section that is not a JSON object, and each value of the wrong type."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        rule = RULES.get(path)
        expected = _SECTION if path in _SECTIONS else _TYPES.get(path)
        if expected is None and rule is not None and rule.fills is not None and isinstance(value, dict | str):
            expected = _NUMBER
        if expected is not None and not expected[1](value) and (value != AUTO or path in _SECTIONS):
            yield path, f"is {json.dumps(value, default=str)}: expected {expected[0]}"
        if isinstance(value, dict):
            yield from _type_problems(value, f"{path}.")


def _problems(deepspeed: Mapping[str, Any], train: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what aliquot refuses in a DeepSpeed JSON.

    The caller must stop at the first problem, because each check relies on the checks before it.

    Args:
        train: the `train` section of the run config, as written by the user.
    """
    yield from _type_problems(deepspeed)
    for path, value in leaves(deepspeed):
        rule = rule_for(path)
        if rule is None and not any(key.startswith(f"{path}.") for key in RULES):
            near = difflib.get_close_matches(path, sorted(RULES), 1, 0.6)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield path, f"is no key of DeepSpeed that aliquot knows{hint}"
        if rule is not None and rule.kind == "rejected" and not _is_harmless(rule, path, value, deepspeed):
            yield path, f"is {value!r}: {rule.note}"
    optimizer = deepspeed.get("optimizer", {}).get("type", "AdamW")
    if optimizer.lower() not in ("adam", "adamw", AUTO):
        yield "optimizer.type", f"is {optimizer!r}: only Adam and AdamW"
    yield from _scheduler_problems(deepspeed.get("scheduler", {}), train)


def _is_harmless(rule: KeyRule, path: str, value: object, deepspeed: Mapping[str, Any]) -> bool:
    if value == AUTO:
        return True
    section = path.partition(".")[0]
    if path.count(".") == 1 and rule_for(section) is rule:
        enabled = deepspeed[section].get("enabled")
        return enabled is False or enabled == AUTO
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in rule.harmless)


def _scheduler_problems(scheduler: Mapping[str, Any], train: Mapping[str, Any]) -> list[Problem]:
    """Return what aliquot's schedules do not reproduce of a scheduler."""
    if not scheduler or scheduler.get("type") == AUTO:
        return []
    kind, options = scheduler.get("type"), scheduler.get("params", {})
    steps = options.get("warmup_num_steps", 1)
    if steps == AUTO:
        steps = train.get("warmup_steps")
        steps = (train.get("warmup_ratio") or 0) if steps is None else steps
    rows = (
        (kind not in _SCHEDULERS, "scheduler.type", f"is {kind!r}: one of {', '.join(_SCHEDULERS)}"),
        (
            steps != 0 and "warmup_type" not in options,
            "scheduler",
            'warms up along a logarithm by default: set "warmup_type": "linear"',
        ),
        (
            kind == "WarmupCosineLR" and "cos_min_ratio" not in options,
            "scheduler",
            'ends above 0 by default: set "cos_min_ratio": 0',
        ),
    )
    return [(path, trouble) for is_wrong, path, trouble in rows if is_wrong]


def _equivalents(deepspeed: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (key of the JSON, key of the run config, value) for every value to copy; "auto" is not copied."""
    for path, value in leaves(deepspeed):
        rule = rule_for(path)
        if value == AUTO or rule is None:
            continue
        if path == "optimizer.params.betas":
            for key, beta in zip(("train.adam_beta1", "train.adam_beta2"), value, strict=True):
                if beta != AUTO:
                    yield path, key, beta
        elif path == "bf16.enabled":
            yield path, "train.precision", "bf16" if value else "fp32"
        elif path == "scheduler.type":
            yield path, "train.lr_scheduler_type", _SCHEDULERS[value]
        elif rule.fills is not None:
            yield path, rule.fills, value


def _check_batch_sizes(
    train: dict[str, Any], filled: Collection[str], deepspeed: Mapping[str, Any], locations: Locations
) -> None:
    """Raise UserError if all three batch settings are set, because two of them determine the third.

    If the global batch size comes from the JSON, it is removed from `train` instead, and checked later.
    """
    if not all(train.get(key) is not None for key in _SIZES):
        return
    if "global_batch_size" in filled and "train_batch_size" in deepspeed:
        del train["global_batch_size"]
        del locations["train", "global_batch_size"]
        return
    places = (f"train.{key} {train[key]} at {locations.get(('train', key), 'the run config')}" for key in _SIZES)
    raise DeepspeedConfigError(f"{', '.join(places)}: two of them fix the third, leave one out")
