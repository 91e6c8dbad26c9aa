"""What every section of a run configuration has in common."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator, model_validator
from pydantic_core import PydanticCustomError

from aliquot.core.errors import has_url_credentials
from aliquot.core.paths import with_home

# What fp32 and 64 bits hold: beyond, what computes with it fails in its own way.
_SMALLEST, _LARGEST, _LARGEST_INTEGER = 1e-37, 1e37, 2**63 - 1
_URL = re.compile(r"\s*[A-Za-z][\w+.:-]*:/")
_NO_PASSWORDS = (
    "is a URL with a user name or password in it: the run directory, reports, dashboards and manifests would show it."
    " Take it out, and give credentials by the environment or a file of the store's client"
)
ABOUT_KEY = "about_key"  # the kind of an error whose message goes on where the key has been named


def _place(value: Any) -> Any:
    """Refuse an empty path, which Python takes for the working directory, and replace ~ and ~NAME."""
    if value in ("", []):
        raise PydanticCustomError(ABOUT_KEY, "is empty")
    if isinstance(value, list) and "" in value:
        raise PydanticCustomError(ABOUT_KEY, "has an empty path")
    return [_expanded(path) for path in value] if isinstance(value, list) else _expanded(value)


def _expanded(value: Any) -> Any:
    """As it is written where nobody has that home: it may be a template, and is told as missing otherwise."""
    if not isinstance(value, str | Path) or not str(value).startswith("~"):
        return value
    path = with_home(value)
    return value if str(path).startswith("~") else str(path)


PATH = BeforeValidator(_place)  # of a key that names a file, a directory, a hub id, or several


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def usable(cls, value: Any) -> Any:
        """No file has a name with NUL in it, no text file a lone surrogate, no URL of a configuration a password."""
        for text in _texts(value):
            if "\0" in text or any("\ud800" <= sign <= "\udfff" for sign in text):
                raise PydanticCustomError(ABOUT_KEY, f"has what is no text: {text!a}")
            if _URL.match(text) and has_url_credentials(text):
                raise PydanticCustomError(ABOUT_KEY, _NO_PASSWORDS)
        if isinstance(value, float) and value and not _SMALLEST <= abs(value) <= _LARGEST:
            raise PydanticCustomError(ABOUT_KEY, f"is {value:g}: give one from {_SMALLEST:g} to {_LARGEST:g}")
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise PydanticCustomError(ABOUT_KEY, "is too large: give one below 2^63")
        return value

    @model_validator(mode="before")
    @classmethod
    def no_true_for_a_number(cls, values: Any) -> Any:
        """Python takes true for 1; a person who writes `max_steps: true` means something else."""
        for key, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(key)
            if (
                isinstance(value, bool)
                and field is not None
                and bool not in (field.annotation, *get_args(field.annotation))
            ):
                options = [str(each) for each in get_args(field.annotation) if get_origin(field.annotation) is Literal]
                choose = f": choose {', '.join(options)}" if options else ""
                raise ValueError(f"{key} is {str(value).lower()}, which is not a value for it{choose}")
        return values


def _texts(value: Any) -> Iterator[str]:
    """In lists and mappings, too."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
