"""The base class of every section of a run configuration: which values no key may have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator, model_validator
from pydantic_core import PydanticCustomError

from aliquot.core.errors import has_url_credentials
from aliquot.core.paths import with_home

# Limits of fp32 and of 64 bits: code that computes with a larger value would fail in a way that names no key.
_SMALLEST, _LARGEST, _LARGEST_INTEGER = 1e-37, 1e37, 2**63 - 1
_URL = re.compile(r"\s*[A-Za-z][\w+.:-]*:/")
_NO_PASSWORDS = (
    "is a URL with a user name or password in it: the run directory, reports, dashboards and manifests would show it."
    " Take it out, and give credentials by the environment or a file of the store's client"
)
ABOUT_KEY = "about_key"  # the type of an error whose message continues a sentence that begins with the key


def _check_path(value: Any) -> Any:
    """Refuse an empty path, which Python takes for the working directory, and replace ~ and ~NAME."""
    if value in ("", []):
        raise PydanticCustomError(ABOUT_KEY, "is empty")
    if isinstance(value, list) and "" in value:
        raise PydanticCustomError(ABOUT_KEY, "has an empty path")
    return [_expand(path) for path in value] if isinstance(value, list) else _expand(value)


def _expand(value: Any) -> Any:
    """Replace ~ and ~NAME; leave an unknown ~NAME: the value may be a template, and a missing path is reported."""
    if not isinstance(value, str | Path) or not str(value).startswith("~"):
        return value
    path = with_home(value)
    return value if str(path).startswith("~") else str(path)


PATH = BeforeValidator(_check_path)  # for a key that names a file, a directory, a hub id, or several of them


class Section(BaseModel):
    """A section of a run configuration. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def check_value(cls, value: Any) -> Any:
        """Refuse NUL and lone surrogates, which no file can hold, passwords in URLs, and numbers out of range."""
        for text in _texts(value):
            if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
                raise PydanticCustomError(ABOUT_KEY, f"has characters that no text file can hold: {text!a}")
            if _URL.match(text) and has_url_credentials(text):
                raise PydanticCustomError(ABOUT_KEY, _NO_PASSWORDS)
        if isinstance(value, float) and value and not _SMALLEST <= abs(value) <= _LARGEST:
            raise PydanticCustomError(ABOUT_KEY, f"is {value:g}: give one from {_SMALLEST:g} to {_LARGEST:g}")
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise PydanticCustomError(ABOUT_KEY, "is too large: give one below 2^63")
        return value

    @model_validator(mode="before")
    @classmethod
    def refuse_booleans_for_numbers(cls, values: Any) -> Any:
        """Refuse `max_steps: true`, which Python would take for 1."""
        for key, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(key)
            if (
                isinstance(value, bool)
                and field is not None
                and bool not in (field.annotation, *get_args(field.annotation))
            ):
                options = map(str, get_args(field.annotation)) if get_origin(field.annotation) is Literal else ()
                choices = ", ".join(options)
                advice = f": choose {choices}" if choices else ""
                raise ValueError(f"{key} is {str(value).lower()}, which is not a value for it{advice}")
        return values


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value, also those in lists and mappings."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
