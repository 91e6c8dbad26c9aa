"""The base classes of the sections of a run's config, with checks that apply to all keys, and the type of `nodes`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from aliquot.core.errors import has_url_credentials

# Limits of fp32 and of 64 bits: code that computes with a larger value would fail in a way that names no key.
_SMALLEST, _LARGEST, _LARGEST_INTEGER = 1e-37, 1e37, 2**63 - 1
_NODE_RANGE = re.compile(r"([1-9][0-9]{0,5}):([1-9][0-9]{0,5})")
_URL = re.compile(r"\s*[A-Za-z][\w+.:-]*:/")
_NO_PASSWORDS = (
    "is a URL with a user name or password in it: the run directory, reports, dashboards and manifests would show it."
    " Remove both, and give credentials by the environment or a file of the store's client"
)
ABOUT_KEY = "about_key"  # the type of an error whose message continues a sentence that begins with the key


def _check_path(value: Any) -> Any:
    """Expand ~ and ~NAME in a path or in a list of paths. Raise for an empty path, which Python would take for `.`."""
    if value in ("", []):
        raise PydanticCustomError(ABOUT_KEY, "is empty")
    if isinstance(value, list) and "" in value:
        raise PydanticCustomError(ABOUT_KEY, "has an empty path")
    if isinstance(value, list):
        return [_check_path(path) for path in value]
    # Unlike Path.expanduser, keep an unknown ~NAME: the value may be a chat template, and otherwise a later error
    # reports the missing path.
    return os.path.expanduser(value) if isinstance(value, str | Path) else value  # noqa: PTH111


PATH = BeforeValidator(_check_path)  # for a key that names a file, a directory, a hub id, or several of them


class Section(BaseModel):
    """A section of a run's config. Unknown keys are errors. The docstring below a key is the description of the key."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False,
        use_attribute_docstrings=True,
    )  # fmt: skip

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Join the lines of the fields' descriptions, which pydantic takes from docstrings with line breaks."""
        long = [field for field in cls.model_fields.values() if "\n" in (field.description or "")]
        for field in long:
            field.description = str(field.description).replace("\n", " ")
        if long:
            cls.model_rebuild(force=True)  # the JSON schema has descriptions, too

    @field_validator("*", mode="after")
    @classmethod
    def check_value(cls, value: Any) -> Any:
        """Raise for values that no key may have.

        These are NUL characters and lone surrogates, which text files cannot contain, passwords in URLs, and numbers
        that are too large or too close to 0.
        """
        for text in texts_in(value):
            if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
                raise PydanticCustomError(ABOUT_KEY, f"has characters that no text file can hold: {text!a}")
            if _URL.match(text) and has_url_credentials(text):
                raise PydanticCustomError(ABOUT_KEY, _NO_PASSWORDS)
        if isinstance(value, float) and value and not _SMALLEST <= abs(value) <= _LARGEST:
            raise PydanticCustomError(ABOUT_KEY, f"is {value:g}: give one from {_SMALLEST:g} to {_LARGEST:g}")
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise PydanticCustomError(ABOUT_KEY, "is too large: give one below 2^63")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def refuse_booleans_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise for a boolean in place of a number, such as `max_steps: true`, which Python would take for 1."""
        kind = cls.model_fields[str(info.field_name)].annotation
        options = get_args(kind)
        is_section = any(isinstance(option, type) and issubclass(option, Section) for option in (kind, *options))
        if isinstance(value, bool) and bool not in (kind, *options) and not is_section:
            advice = f": choose {', '.join(map(str, options))}" if get_origin(kind) is Literal else ""
            raise PydanticCustomError(ABOUT_KEY, f"cannot be {str(value).lower()}{advice}")
        return value


def refuse(*problems: tuple[object, str], error: Callable[[str], Exception] = ValueError) -> None:
    """Raise `error` with the message of the first problem, a pair (whether it is present, message)."""
    for is_present, message in problems:
        if is_present:
            raise error(message)


KeyUse = tuple[Sequence[str], bool, str]  # keys, whether the run reads them, and otherwise why not and what to do


def refuse_unused(section: Section, prefix: str, uses: Iterable[KeyUse]) -> None:
    """Raise ValueError for the first key that has another value than its default, although no code reads the key."""
    refuse(
        *(
            (not is_read and getattr(section, key) != type(section).model_fields[key].default, f"{prefix}{key} {why}")
            for keys, is_read, why in uses
            for key in keys
        )
    )


def texts_in(value: Any) -> Iterator[str]:
    """Yield all strings and paths in a value, including those inside lists and mappings."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts_in(key)
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


def _check_range(text: str) -> str:
    match = _NODE_RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError("give a number, or MIN:MAX for nodes that may come and go, for example 2:4")
    return text


NodeCount = Annotated[int, Field(gt=0, le=999_999)] | Annotated[str, AfterValidator(_check_range)]


class SectionWithNodes(Section):
    """A section with a key `nodes`: a number of machines, or MIN:MAX. Subclasses declare the key."""

    if TYPE_CHECKING:
        nodes: NodeCount

    @property
    def fewest_nodes(self) -> int:
        return int(str(self.nodes).partition(":")[0])

    @property
    def most_nodes(self) -> int:
        return int(str(self.nodes).rpartition(":")[2])

    @property
    def is_elastic(self) -> bool:
        """Whether `nodes` is MIN:MAX, so that nodes may come and go during the run."""
        return ":" in str(self.nodes)
