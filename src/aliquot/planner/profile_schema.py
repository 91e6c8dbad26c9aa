"""What a kept profile of a machine must hold before anything is planned by it: a file in a cache may be anybody's."""

from __future__ import annotations

import functools
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter
from typing_extensions import TypedDict

_Rate = Annotated[FiniteFloat, Field(gt=0)]
_Points = Annotated[list[tuple[_Rate, _Rate]], Field(min_length=1)]  # (size, rate)
_Count = Annotated[int, Field(ge=1)]
_BySize = TypedDict("_BySize", {"2": _Points, "4": _Points})  # bytes of an element
_SmallBySize = TypedDict("_SmallBySize", {"2": _Rate, "4": _Rate})


class _ByOperation(TypedDict):
    copy: _Points
    add: _Points
    silu: _Points
    tanh: _Points
    softmax: _Points
    sum: _Points
    convert: _Points
    permute: _Points
    transpose: _Points


class _ByKept(TypedDict):
    """(sources, elements/s)"""

    fp32: _Points
    bf16: _Points


class _ByStates(TypedDict):
    fp32: _Rate
    bf16: _Rate
    int8: _Rate


class _Tables(TypedDict):
    """See measure_rates."""

    products: _BySize  # plain ones
    of_layers: _BySize  # as a layer's forward and backward pass make them
    sums: _ByKept
    updates: _ByStates
    small: _SmallBySize
    memory: _ByOperation
    stage: _Rate
    patch: _Rate
    call_s: _Rate
    socket_bytes_per_s: _Rate
    spread: FiniteFloat


class _Profile(TypedDict):
    format: int
    at: FiniteFloat
    date: str


class _Thorough(_Profile):
    core: _Tables
    all_cores: _Tables
    cores: _Count


class _Quick(_Profile):
    ranks: _Count
    threads: _Count
    tables: _Tables


def check_thorough(profile: Any) -> None:
    """Raises ValueError."""
    _adapter(_Thorough).validate_python(profile)


def check_quick(profile: Any) -> None:
    """Raises ValueError."""
    _adapter(_Quick).validate_python(profile)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
