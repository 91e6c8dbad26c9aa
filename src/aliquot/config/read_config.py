"""Read a YAML run configuration with `section.key=value` overrides; every error names file, line and key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from aliquot.config import other_names
from aliquot.config.deepspeed_json import fill_from_deepspeed
from aliquot.config.key_locations import Keys, Location, place_of_first
from aliquot.config.schema import RunConfig
from aliquot.config.section import OF_KEY
from aliquot.core.decode import BoundedLoader, TooDeepError, load_yaml
from aliquot.core.errors import ConfigError, one_line

_SHORT = 80
_NEAR = 0.8  # how alike what was written must be to what was meant; absurd neighbours are below


def read_config(file: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated configuration of `file`; paths inside it are relative to the working directory.

    An override replaces one key and is parsed as YAML: `train.max_steps=10`, `model.config.hidden_size=64`,
    `data.path=[a.txt, b.txt]`. Raises UserError naming file:line (or the override) and the key.
    """
    return read_with_places(Path(file), overrides)[0]


def read_with_places(file: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, dict[Keys, Location]]:
    """As `read_config`, and where each key that is not a default was written: `run.yaml:7`, `cpu-ds.json:3`."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no text, or NUL in its name
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"cannot read this config: {reason}", file) from None
    locations: dict[Keys, Location] = {}
    name = one_line(file)
    values = _load(text, name, locations)
    for override in overrides:
        apply_override(values, override, locations)
    fill_from_deepspeed(values, locations)
    return validate(values, locations, name), locations


def validate(values: Mapping[str, Any], locations: Mapping[Keys, Location], where: str) -> RunConfig:
    """Validate nested values; `locations` tells where each key was written, `where` is named for a missing one."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for problem in error.errors():
            place, message = _explain(dict(problem), locations, where)
            # A union has an error a branch: `2 or auto`. A line may have several unknown keys.
            between = "; " if problem["type"] == "extra_forbidden" else ", or "
            problems[place] = f"{problems[place]}{between}{message}" if place in problems else message
        raise ConfigError("; ".join(f"{place}: {message}" for place, message in problems.items())) from None


def dump_config(config: RunConfig) -> str:
    """The complete configuration as YAML, readable again by `read_config`."""
    values = config.model_dump(mode="json", by_alias=True)
    if config.train.global_batch_size is not None and config.train.gradient_accumulation_steps is not None:
        del values["train"]["per_device_train_batch_size"]  # which these two fix
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def dump_with_places(config: RunConfig, places: Mapping[Keys, Location]) -> str:
    """`dump_config`, each line with the place where its value was written, where it is not a default."""
    lines, section, written = [], "", {keys: place for keys, place in places.items() if len(keys) <= 2}
    for line in dump_config(config).splitlines():
        key = line.strip().partition(":")[0]
        indent = len(line) - len(line.lstrip())
        keys = (section, key) if indent == 2 else (key,)
        section = key if indent == 0 else section
        place = written.get(keys) if indent == 2 else None
        lines.append(f"{line}  # {place}" if place is not None else line)
    return "\n".join(lines) + "\n"


def _load(text: str, name: str, locations: dict[Keys, Location]) -> dict[str, Any]:
    try:
        values, root = load_yaml(text, _Loader)
        if root is None:
            return {}
        if isinstance(values, dict):
            _locate(root, (), name, locations)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        wrong = "" if isinstance(error, _OfTwoMeanings) else "not valid YAML: "
        raise ConfigError(f"{wrong}{error.problem or error.context}", f"{name}:{line}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date like 2026-99-99
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}", name) from None
    if not isinstance(values, dict):
        raise ConfigError("a config is a mapping of sections (run, model, data, train, ...)", name)
    return values


def _locate(node: yaml.Node, keys: Keys, name: str, locations: dict[Keys, Location]) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, each in enumerate(node.value):
            path = (*keys, str(index))
            locations[path] = f"{name}:{each.start_mark.line + 1}"
            _locate(each, path, name, locations)
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        path = (*keys, str(key_node.value))
        line = f"{name}:{key_node.start_mark.line + 1}"
        if path in locations:
            raise ConfigError(f"{'.'.join(path)} is set twice, first at {locations[path]}", line)
        locations[path] = line
        _locate(value_node, path, name, locations)


def apply_override(values: dict[str, Any], override: str, locations: dict[Keys, Location]) -> None:
    path, equals, text = override.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or len(keys) < 2 or not all(keys):
        hint = _suggestion(keys, None) if equals and len(keys) == 1 and keys[0] else ""
        raise ConfigError(f"override {override!r}: expected section.key=value, for example train.max_steps=10{hint}")
    try:
        value, _ = load_yaml(text, _Loader)
    except _OfTwoMeanings as error:
        raise ConfigError(f"override {override!r}: {error.problem}") from None
    except TooDeepError as error:
        raise ConfigError(f"override {override[:200]!r}: {error}") from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"override {override[:200]!r}: the value is not valid YAML") from None
    section = values
    for depth, key in enumerate(keys[:-1], 1):
        inner = section.setdefault(key, {})
        if inner is None:
            inner = section[key] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(keys[:depth])} is not a section")
        section = inner
    section[keys[-1]] = value
    locations[keys] = f"override {override!r}"


def _explain(problem: dict[str, Any], locations: Mapping[Keys, Location], where: str) -> tuple[str, str]:
    """(where it is and of which key, what is wrong with it)."""
    keys = tuple(str(key) for key in problem["loc"])
    # A union reports `section.key.branch`; the longest prefix that was written down is the key itself.
    known = next((keys[:n] for n in range(len(keys), 0, -1) if keys[:n] in locations), ())
    place = locations.get(known, where)
    kind = problem["type"]
    if kind == "extra_forbidden":
        return place, f"unknown key {'.'.join(keys)}{_suggestion(keys, problem['input'])}"
    if kind == "missing":
        return f"{place}: {'.'.join(keys)}", "is missing"
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if kind == "value_error":
        return place if len(known) > 1 else place_of_first(message, locations) or place, message
    if kind == OF_KEY:
        return place, f"{'.'.join(keys)} {message}"
    if kind == "string_type" and isinstance(problem["input"], int | float):
        message = "input should be text: put it in quotes"
    name = ".".join(known or keys)
    if problem["input"] is None:
        about = _meaning(known or keys)
        return f"{place}: {name} is null (leave it out for its default{about})", message
    return f"{place}: {name} is {problem['input']!r}", message


def _meaning(keys: Keys) -> str:
    """How the schema describes a key of a section, where that is short: what stands for `none` may be in it."""
    section = RunConfig.model_fields.get(keys[0]) if len(keys) == 2 else None
    fields = getattr(section.annotation, "model_fields", {}) if section is not None else {}
    told = next((field.description for name, field in fields.items() if (field.alias or name) == keys[-1]), None)
    return f"; {told.rstrip('.')}" if told is not None and len(told) < _SHORT else ""


def _suggestion(keys: Keys, value: object) -> str:
    """What to write instead: our key for what it is called elsewhere, the right section, or the nearest spelling."""
    section, name = [key for key in keys[:-1] if not key.isdigit()], keys[-1]  # without its place in a list
    ours = known_keys()
    beside = {path[-1]: path for path in ours if list(path[:-1]) == section}
    theirs = other_names.OURS.keys() | other_names.NONE.keys()
    near = difflib.get_close_matches(name, sorted(beside.keys() | theirs), 1, _NEAR)
    told = _of_mapping(value) if isinstance(value, dict) and not near else None
    told = told or other_names.answer(".".join(keys))
    if told is not None:
        return f"; {told}"
    if elsewhere := sorted(".".join(path) for path in ours if path[-1] == name):
        return f"; did you mean {elsewhere[0]}?"
    if near and near[0] not in beside:
        return f"; did you mean {near[0]}? {other_names.answer(near[0])}"
    dotted = [".".join(beside[near[0]])] if near else []
    dotted = dotted or difflib.get_close_matches(".".join(keys), sorted(map(".".join, ours)), 1, _NEAR)
    return f"; did you mean {dotted[0]}?" if dotted else ""


def _of_mapping(values: dict[Any, Any]) -> str | None:
    """Of a section that exists elsewhere: where its keys are here."""
    places = {path[-1]: ".".join(path) for path in reversed(known_keys()) if len(path) == 2}
    told = []
    for name in map(str, values):
        place = other_names.OURS.get(name, places.get(name))
        told += [f"its {name} is {place} here"] if place is not None else []
    return ", ".join(told) or None


def known_keys() -> list[Keys]:
    """Every key of the schema: sections, `section.key`, and those of sections inside a section or in a list of it."""
    return list(_keys_of(RunConfig, ()))


def _keys_of(model: type[BaseModel], prefix: Keys) -> Iterator[Keys]:
    for name, field in model.model_fields.items():
        path = (*prefix, field.alias or name)
        yield path
        kinds = [field.annotation, *get_args(field.annotation)]  # a section, `section | None`, a list of sections
        for kind in [*kinds, *(of for each in kinds for of in get_args(each))]:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys_of(kind, path)


class _Loader(BoundedLoader):
    """YAML 1.2's numbers, where PyYAML follows 1.1: `2e-5` is one, and `2:4` is not (124, to the base of 60)."""


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as numbers."""


class _OfTwoMeanings(yaml.MarkedYAMLError):
    """What readers of YAML 1.1 and of YAML 1.2 take for different numbers."""


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int | str:
    if ":" in node.value:
        return str(node.value)
    digits = node.value.replace("_", "").lstrip("+-")
    if digits.startswith("0") and digits.strip("0") and digits.isdigit():
        told = f"{node.value} is {int(digits, 8)} to some readers of YAML and {int(digits)} to others"
        raise _OfTwoMeanings(
            problem=f"{told}: write it without the leading 0, or in quotes if it is text", problem_mark=node.start_mark
        )
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
