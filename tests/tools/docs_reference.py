"""Writes docs/reference/config.md and commands.md from the code: `python -m tests.tools.docs_reference`.

tests/test_docs.py fails when a page is not what this would write.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo

from aliquot.cli.main import app
from aliquot.config.schema import RunConfig

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
_MADE = """<!-- made by `python -m tests.tools.docs_reference` -->
"""
_CONFIG = f"""# Configuration

{_MADE}
A run configuration is a YAML file with one mapping for each section below. This page lists all keys of all sections.

- On the command line, `section.key=value` replaces one key. The value is parsed as YAML: `data.path=[a.txt, b.txt]`.
  `adapter=null` leaves out a section.
- Paths are relative to the working directory.
- Keys of `train` have the names of Hugging Face's `TrainingArguments` where that class has the same setting.
- The sections `adapter` and `cluster` are optional. A key that is required is required only if its section is present.
- An error names file and line, and suggests the nearest existing key for an unknown key.

`aliquot plan CONFIG --print-config` prints the complete configuration, and the place where each value was set.
"""
_COMMANDS = f"""# Commands

{_MADE}
This page lists every command with its arguments and its own options. `aliquot COMMAND --help` prints the same text, and
describes the arguments, too. `aliquot --version` prints the version. `aliquot --install-completion` installs the
completion of commands and options for bash, zsh, fish or PowerShell; `--show-completion` prints the script instead.

| exit code | meaning |
|--|--|
| 0 | success |
| 1 | the run stopped because of an error; `plan`: the run does not fit (`train`: 2); `doctor`: a problem |
| 2 | bad input: correct it first; `cluster proof`: a node is too slow |
| 143, 130, 129 | SIGTERM, Ctrl-C or SIGHUP stopped the command; a run that has trained saves a checkpoint first |
| 137 | SIGKILL ended the command, which saves nothing. If SIGKILL ends one of several ranks, the code is 1 |

An error is one line on standard error. The id in brackets at its end has a section in
[Troubleshooting](../guides/troubleshooting.md). If the usage of a command
shows `[section.key=value ...]`, you can set keys of the [configuration](config.md) there.
"""


def pages() -> dict[Path, str]:
    """Return the generated pages: file -> text."""
    parts = {"config.md": [_CONFIG, *_sections()], "commands.md": [_COMMANDS, *_commands()]}
    return {REFERENCE / name: "\n".join(lines).rstrip() + "\n" for name, lines in parts.items()}


def _sections() -> Iterator[str]:
    schema = RunConfig.model_json_schema(by_alias=True)
    for name, section in schema["properties"].items():
        yield from [f"## `{name}`", "", "| key | value | default | meaning |", "|--|--|--|--|"]
        yield from _rows(_resolved(section, schema), schema, f"{name}.")
        yield ""


def _rows(section: dict[str, Any], schema: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, field in section["properties"].items():
        inner = _resolved(field, schema)
        if "properties" in inner:
            yield from _rows(inner, schema, f"{prefix}{name}.")
            continue
        needed = name in section.get("required", ())
        entry = _entry(field, schema)
        default = "required" if needed else _default(field.get("default"))
        yield f"| `{prefix}{name}` | {_kind(field, schema)} | {default} | {_cell(field.get('description', ''))} |"
        if entry is not None:  # of which those keys are shown that the section itself does not have
            own = {key: value for key, value in entry["properties"].items() if key not in section["properties"]}
            yield from _rows({**entry, "properties": own}, schema, f"{prefix}{name}[].")


def _entry(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """The object that a list consists of; None: it is no list of objects."""
    for each in (field, *field.get("anyOf", ())):
        if each.get("type") == "array" and "$ref" in each["items"]:
            return _resolved(each["items"], schema)
    return None


def _resolved(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The object that `field` refers to, also where it may be null; else the field."""
    for each in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
        if "$ref" in each:
            return schema["$defs"][each["$ref"].rpartition("/")[2]]
    return field


def _kind(field: dict[str, Any], schema: dict[str, Any]) -> str:
    if "$ref" in field:
        return "mapping"
    if "anyOf" in field:
        return " or ".join(_kind(each, schema) for each in field["anyOf"] if each.get("type") != "null")
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_kind(field['items'], schema)}"
    if field.get("type") in ("integer", "number"):
        signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
        limits = [
            f"{sign} {field[key]:,.10g}" for key, sign in signs.items() if key in field and abs(field[key]) < 2**53
        ]
        return " ".join([field["type"], ", ".join(limits)]).strip()
    names = {"string": "text", "boolean": "true, false", "object": "mapping"}
    return "path" if field.get("format") == "path" else names[field["type"]]


def _default(value: Any) -> str:
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    """Escape `|`, and `<` outside of code."""
    return re.sub(r"`[^`]*`|<", lambda found: found[0].replace("<", "&lt;", found[0] == "<"), text).replace("|", "\\|")


def _commands() -> Iterator[str]:
    for name, function in _functions(app, "aliquot"):
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        told = [(each, *get_args(each.annotation)[:2]) for each in parameters]  # Annotated[kind, Argument or Option]
        arguments = [info.metavar or each.name.upper() for each, _, info in told if isinstance(info, ArgumentInfo)]
        yield from [f"## `{name}`", "", f"`{' '.join([name, *arguments])}`", ""]
        head = ["", "| option | default | meaning |", "|--|--|--|"] if len(arguments) < len(told) else []
        yield from [" ".join((function.__doc__ or "").split()), *head]
        for each, kind, info in told:
            if isinstance(info, OptionInfo):
                # In Annotated the first name lies where a default would.
                names = [*filter(lambda one: one.startswith("-"), [str(info.default)]), *(info.param_decls or ())]
                option = ", ".join(names or [f"--{each.name.replace('_', '-')}"])
                default = "required" if each.default is each.empty else f"`{each.default}`"
                default = "" if each.default in (None, False, "") else default
                yield f"| `{_cell(f'{option} {_choices(kind)}'.strip())}` | {default} | {_cell(info.help or '')} |"
        yield ""


def _functions(group: typer.Typer, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{name} {command.name}", command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _functions(inner.typer_instance, f"{name} {inner.name}")


def _choices(kind: Any) -> str:
    """`time|cost` of `Literal["time", "cost"] | None`."""
    branches = [kind, *get_args(kind)]
    return next(("|".join(get_args(each)) for each in branches if get_origin(each) is Literal), "")


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text)
