"""Read the YAML config of a run with `section.key=value` overrides; every error names file, line and key."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from aliquot.config.deepspeed_json import fill_from_deepspeed
from aliquot.config.key_hints import argument_for, key_for, known_keys, section_advice, suggestion
from aliquot.config.key_locations import OVERRIDE, KeyPath, Location, key_lines, locate_contradiction
from aliquot.config.schema import RunConfig
from aliquot.config.section import ABOUT_KEY
from aliquot.core.decode import BoundedLoader, TooDeepError, describe_yaml_error, load_yaml
from aliquot.core.errors import ConfigError, one_line

_MAX_MEANING = 80  # letters of a description that an error quotes


def read_config(file: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate a run configuration.

    Args:
        file: a YAML file. Paths in the file are relative to the working directory.
        overrides: texts `section.key=value`. Each text replaces one key; the value is parsed as YAML, for example
            `train.max_steps=10`, `model.config.hidden_size=64` or `data.path=[a.txt, b.txt]`.

    Raises:
        UserError: the file cannot be read, or values are wrong. The message names each wrong key with its file and
            line, or with its override.
    """
    return read_with_locations(Path(file), overrides)[0]


def read_with_locations(file: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, dict[KeyPath, Location]]:
    """Read a config as `read_config` does; also return the location of each key that a file or an override sets.

    A location is a file and line such as `run.yaml:7` or `cpu-ds.json:3` (a DeepSpeed JSON), or the override.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or NUL in the file name
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"cannot read this config: {reason}", file) from None
    return read_text(text, one_line(file), overrides)


def read_text(text: str, name: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, dict[KeyPath, Location]]:
    """Read the text of a config like `read_with_locations`; errors call the text `name`."""
    locations: dict[KeyPath, Location] = {}
    values = _load(text, name, locations)
    if "model_type" in values and "model" not in values:
        raise ConfigError(
            "this is the config of a model, and not of a run: write a YAML whose model.config names this file"
            " (from scratch), or whose model.path names its directory (fine-tune)", name,
        )  # fmt: skip
    for override in overrides:
        apply_override(values, override, locations)
    fill_from_deepspeed(values, locations)
    return validate(values, locations, name), locations


def validate(values: Mapping[str, Any], locations: Mapping[KeyPath, Location], source: str) -> RunConfig:
    """Return nested `values` as a RunConfig. Raises one ConfigError that lists all problems.

    Args:
        locations: where each key was written, for errors.
        source: the file or command line to name in an error about a key without a location.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for problem in error.errors():
            place, message = _explain(dict(problem), locations, source)
            # A union has an error a branch: `2 or auto`. A line may have several unknown keys.
            separator = "; " if problem["type"] == "extra_forbidden" else ", or "
            problems[place] = f"{problems[place]}{separator}{message}" if place in problems else message
        lines = [f"{place}: {message}" for place, message in problems.items()]
        raise ConfigError("; ".join(lines), problems=lines) from None


def apply_override(values: dict[str, Any], override: str, locations: dict[KeyPath, Location]) -> None:
    """Set the key of nested `values` that the override `section.key=value` names, and record the key's location.

    `section=null` leaves out an optional section.
    """
    path, equals, text = override.partition("=")
    keys = tuple(path.strip().split("."))
    is_null_section = path.strip() in RunConfig.model_fields and text.strip() == "null"
    if not equals or (len(keys) < 2 and not is_null_section) or not all(keys) or path.startswith("-"):
        raise ConfigError(
            f"override {override!r}: expected section.key=value{_expected(path.strip(), text if equals else None)}"
        )
    try:
        value, _ = load_yaml(text, _Loader)
    except _AmbiguousNumberError as error:
        raise ConfigError(f"override {override!r}: {error.problem}") from None
    except TooDeepError as error:
        raise ConfigError(f"override {override[:200]!r}: {error}") from None
    except yaml.reader.ReaderError as error:
        # The interpreter gives a byte that is not UTF-8 as a surrogate. YAML refuses control characters, too.
        what = "its bytes are not UTF-8" if 0xDC80 <= error.character <= 0xDCFF else "YAML allows no control characters"
        raise ConfigError(f"override {os.fsencode(override[:200])!r}: {what}. Type the value again") from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"override {override[:200]!r}: the value is not valid YAML") from None
    section = values
    for depth, key in enumerate(keys[:-1], 1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(keys[:depth])} is not a section")
    section[keys[-1]] = value
    if keys == ("model", "path") and value is not None:
        _replace_model_from_scratch(section, locations)
    locations[keys] = f"{OVERRIDE}{override!r}"


def _replace_model_from_scratch(model: dict[str, Any], locations: dict[KeyPath, Location]) -> None:
    """Remove the file's `model.config`, because an override sets `model.path`; an override of both is an error."""
    places = [keys for keys in locations if keys[:2] == ("model", "config")]
    if not any(locations[keys].startswith(OVERRIDE) for keys in places):
        model.pop("config", None)
        for keys in places:
            del locations[keys]


def _expected(name: str, value: str | None) -> str:
    """Return what to write instead of an override of another form."""
    if value is None and ":" in name:
        name, _, value = name.partition(":")
    if name in RunConfig.model_fields and value is not None:
        return f", and {name} is a section; write {name}.{key_for(name, value) or 'KEY'}={value}"
    hint = argument_for(name, value)
    return f"; {hint}" if hint else ", for example train.max_steps=10"


def dump_config(config: RunConfig) -> str:
    """Return the complete config, including defaults, as YAML that `read_config` can read."""
    values = config.model_dump(mode="json", by_alias=True)
    if config.train.global_batch_size is not None and config.train.gradient_accumulation_steps is not None:
        del values["train"]["per_device_train_batch_size"]  # it follows from these two
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def dump_with_locations(config: RunConfig, locations: Mapping[KeyPath, Location]) -> str:
    """Return the text of `dump_config`, with a comment on the origin of each value that a file or an override sets."""
    lines, section = [], ""
    for line in dump_config(config).splitlines():
        key = line.strip().partition(":")[0]
        indent = len(line) - len(line.lstrip())
        section = key if indent == 0 else section
        location = locations.get((section, key)) if indent == 2 else None
        lines.append(f"{line}  # {location}" if location is not None else line)
    return "\n".join(lines) + "\n"


def _load(text: str, name: str, locations: dict[KeyPath, Location]) -> dict[str, Any]:
    try:
        values, root = load_yaml(text, _Loader)
        if root is None:
            return {}
        for path, line in key_lines(root) if isinstance(values, dict) else ():
            if path in locations:
                raise ConfigError(f"{'.'.join(path)} is set twice, first at {locations[path]}", f"{name}:{line}")
            locations[path] = f"{name}:{line}"
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        is_ambiguous = isinstance(error, _AmbiguousNumberError)
        message = error.problem if is_ambiguous else f"not valid YAML: {describe_yaml_error(error, text)}"
        raise ConfigError(str(message), f"{name}:{line}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date like 2026-99-99
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}", name) from None
    if not isinstance(values, dict):
        raise ConfigError("a config is a mapping of sections (run, model, data, train, ...)", name)
    return values


def _explain(problem: dict[str, Any], locations: Mapping[KeyPath, Location], source: str) -> tuple[str, str]:
    """Return (place, description) of a problem that pydantic reports; the place may include the key."""
    keys = tuple(str(key) for key in problem["loc"])
    # A union reports `section.key.branch`; the longest prefix that was written down is the key itself.
    written = next((keys[:n] for n in range(len(keys), 0, -1) if keys[:n] in locations), ())
    below = (location for path, location in locations.items() if path[: len(keys)] == keys)  # of an override's section
    place = locations[written] if written else next(below, source) if keys else source
    error_type = problem["type"]
    if error_type == "extra_forbidden":
        needs_indentation = len(keys) == 1 and any(path[1:] == keys for path in known_keys())
        indent = " (indent a key below the name of its section)" if needs_indentation else ""
        return place, f"unknown key {'.'.join(keys)}{suggestion(keys, problem['input'])}{indent}"
    if error_type == "missing":
        kind = "the section" if len(keys) == 1 else "the key"
        return place, f"{kind} {'.'.join(keys)} is missing"
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if error_type == "value_error":
        return locate_contradiction(message, locations, keys, place) if len(written) < 2 else (place, message)
    if error_type == ABOUT_KEY:
        return place, f"{'.'.join(keys)} {message}"
    if error_type == "string_type" and isinstance(problem["input"], int | float):
        message = "input should be text: put it in quotes"
    message = message.partition(", unable to parse")[0]
    name = ".".join(written or keys)
    if problem["input"] is None:
        meaning = _meaning(written or keys)
        return f"{place}: {name} is null (leave it out for its default{meaning})", message
    if error_type == "model_type" and len(keys) == 1:
        advice = section_advice(name, problem["input"])
        value = json.dumps(problem["input"]) if isinstance(problem["input"], bool) else repr(problem["input"])
        return place, f"{name} is {value}, but {name} is a section: {advice}"
    return f"{place}: {name} is {problem['input']!r}", message + _as_fraction(problem)


def _as_fraction(problem: Mapping[str, Any]) -> str:
    """Return the suggestion to write a percentage as a fraction; empty if the value is no percentage."""
    limits, value = problem.get("ctx") or {}, problem["input"]
    limit = limits.get("le", limits.get("lt"))
    if not isinstance(value, int | float) or not isinstance(limit, int | float) or not 0 < limit <= 1 < value:
        return ""
    return f"; did you mean {value / 100:g}?" if value / 100 <= limit else ""


def _meaning(keys: KeyPath) -> str:
    """Return the schema's description of a key if it is short, because it may say which value to write for `none`."""
    section = RunConfig.model_fields.get(keys[0]) if len(keys) == 2 else None
    fields = getattr(section.annotation, "model_fields", {}) if section is not None else {}
    text = next((field.description for name, field in fields.items() if (field.alias or name) == keys[-1]), None)
    return f"; {text.rstrip('.')}" if text is not None and len(text) < _MAX_MEANING else ""


class _Loader(BoundedLoader):
    """Reads numbers by YAML 1.2, unlike PyYAML, which follows YAML 1.1.

    By YAML 1.2 `2e-5` is a number and `2:4` is text; by YAML 1.1 `2e-5` is text and `2:4` is 124 (base 60).
    """


class _Dumper(yaml.SafeDumper):
    """Writes YAML: a scalar is one line, and strings that `_Loader` would read as numbers have quotes."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\n" in data else None)


class _AmbiguousNumberError(yaml.MarkedYAMLError):
    """A text, such as `010`, is a different number in YAML 1.1 and in YAML 1.2."""


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int | str:
    if ":" in node.value:
        return str(node.value)
    digits = node.value.replace("_", "").lstrip("+-")
    if digits.startswith("0") and digits.strip("0") and digits.isdigit():
        meanings = f"{node.value} is {int(digits, 8)} to some readers of YAML and {int(digits)} to others"
        raise _AmbiguousNumberError(
            problem=f"{meanings}: write it without the leading 0, or in quotes if it is text",
            problem_mark=node.start_mark,
        )
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Dumper.add_representer(str, _Dumper.represent_str)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
