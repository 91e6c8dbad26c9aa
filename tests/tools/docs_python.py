"""Writes signatures and purposes into docs/reference/python.md: `python -m tests.tools.docs_python`.

The page names each object in a comment, which holds the directive of mkdocstrings. In the repository, readers see the
text that this tool writes below the comment; on the site, docs/links.py replaces that text by the directive.
tests/test_docs.py fails when the page is not what this would write.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

import aliquot

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "python.md"
_ENTRY = re.compile(
    r"<!-- ::: aliquot\.(?P<name>\w+)(?P<options>.*?)\n-->\n.*?(?=^## |^<!-- :::|\Z)", re.MULTILINE | re.DOTALL
)
_WIDTH = 120


def page() -> str:
    """Return the page with the present signatures and purposes."""
    return _ENTRY.sub(_entry, PAGE.read_text()).rstrip() + "\n"


def names() -> list[str]:
    """Return the names that the page describes."""
    return [entry["name"] for entry in _ENTRY.finditer(PAGE.read_text())]


def _entry(entry: re.Match[str]) -> str:
    name, exported = entry["name"], getattr(aliquot, entry["name"])
    if inspect.isclass(exported):
        options = (yaml.safe_load(entry["options"]) or {}).get("options", {})
        lines = [f"class {name}", *_members(exported, options.get("members", True))]
    elif inspect.ismodule(exported):
        functions = inspect.getmembers(exported, inspect.isfunction)
        defined = [function for _, function in functions if function.__module__ == exported.__name__]
        lines = [_signature(f"{name}.{function.__name__}", function) for function in defined]
    else:
        lines = [_signature(name, exported)]
    purpose = " ".join((inspect.getdoc(exported) or "").split("\n\n")[0].split())
    return "\n".join(
        [
            f"<!-- ::: aliquot.{name}{entry['options']}", "-->", f'<a id="aliquot.{name}"></a>', "",
            "```python", *lines, "```", "", *textwrap.wrap(purpose, _WIDTH), "", "",
        ]
    )  # fmt: skip


def _members(kind: type, shown: bool | list[str]) -> Iterator[str]:
    """Yield a line for each member in `shown`; True: all public members that `kind` itself defines."""
    if shown is False:
        return
    fields = vars(kind).get("__annotations__", {})
    for name in dict.fromkeys([*fields, *vars(kind)]) if shown is True else shown:
        member = inspect.getattr_static(kind, name, None)
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"    {name}: {member.fget.__annotations__['return']}"
        elif callable(member) or isinstance(member, classmethod):
            yield textwrap.indent(_signature(name, getattr(kind, name)), "    ")
        else:
            yield f"    {name}: {fields[name]}"


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = [_parameter(each) for each in signature.parameters.values() if each.name != "self"]
    kinds = [each.kind for each in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"{name}({', '.join(parameters)}) -> {signature.return_annotation}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in parameters), f") -> {signature.return_annotation}"])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""
    text = f"{stars}{parameter.name}: {parameter.annotation}"
    if parameter.default is inspect.Parameter.empty:
        return text
    default = repr(parameter.default)
    return f"{text} = {'...' if '<' in default else default}"  # an object, whose text is an address


if __name__ == "__main__":
    PAGE.write_text(page())
