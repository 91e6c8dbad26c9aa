"""The layout in which a model's weights are published, if it differs from the model's: single experts, or other names.

transformers defines the layout by the conversion that `save_pretrained` reverts. Converting numbers that encode their
own places shows what becomes of each weight. If a published tensor is not one range of one weight, the model is stored
in its own layout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from aliquot.tensor_io.bytemap import Shape
from aliquot.tensor_io.parts import Part, PartSource, PartStore, ViewableStore

_log = logging.getLogger(__name__)

_SMALL = (4, 2)  # sizes for an expert's matrix: a conversion may halve them, and they differ


@dataclass(frozen=True)
class Published:
    """A published tensor: elements [start, start + numel) of the weight `source`."""

    name: str
    shape: Shape
    source: str
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def published_of(model: nn.Module, tensors: Sequence[tuple[str, Shape]]) -> tuple[Published, ...] | None:
    """Return the published layout in the order of `tensors`; None if it is the model's, or not made of ranges."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return None

    numbers, places = {}, []
    end = 0
    for name, shape in tensors:
        small = (shape[0], *_SMALL) if len(shape) == 3 else (*_SMALL, *[2] * len(shape))[: len(shape)]
        start, end = end, end + math.prod(small)
        numbers[name] = torch.arange(start, end).view(small)
        places.append((start, end, name, shape, small))
    try:
        converted: Mapping[str, Tensor] = revert_weight_conversion(model, numbers)
    except Exception as error:  # the conversion needs real weights
        _log.warning(
            "%s is stored as transformers holds it, not as it is published: its conversion fails on numbers (%s)",
            type(model).__name__,
            error,
        )
        return None
    if converted.keys() == numbers.keys() and all(converted[name].equal(numbers[name]) for name in numbers):
        return None
    layout = []
    for name, values in converted.items():
        flat = values.reshape(-1)
        first = int(flat[0])
        start, end, source, shape, small = next(place for place in places if place[0] <= first < place[1])
        whole = Fraction(math.prod(shape), math.prod(small))
        dimensions = _scaled(tuple(values.shape), shape, small)
        at = (first - start) * whole
        if not bool((flat.diff() == 1).all()) or int(flat[-1]) >= end or dimensions is None or at.denominator != 1:
            return None
        layout.append(Published(name, dimensions, source, int(at)))
    order = {name: number for number, (name, _) in enumerate(tensors)}
    layout.sort(key=lambda tensor: (order[tensor.source], tensor.start))
    is_complete = sum(tensor.stop - tensor.start for tensor in layout) == sum(math.prod(shape) for _, shape in tensors)
    return tuple(layout) if is_complete else None


def _scaled(converted: Shape, shape: Shape, small: Shape) -> Shape | None:
    """Scale the `converted` shape as `shape` relates to `small`; first dimensions may be missing.

    None if impossible.
    """
    missing = len(small) - len(converted)
    if missing < 0:
        return None
    scaled = [Fraction(f * of, s) for f, of, s in zip(converted, shape[missing:], small[missing:], strict=True)]
    return tuple(map(int, scaled)) if all(size.denominator == 1 for size in scaled) else None


def tensors_of(published: Sequence[Published]) -> list[tuple[str, Shape]]:
    return [(tensor.name, tensor.shape) for tensor in published]


class PublishedParts:
    """The weights of a store as parts of published tensors, for reading."""

    def __init__(self, store: PartSource, published: Sequence[Published]) -> None:
        self._store = store
        tensors_of_source: dict[str, list[Published]] = {}
        for tensor in published:
            tensors_of_source.setdefault(tensor.source, []).append(tensor)
        self._held = dict(self._cut(tensors_of_source))

    def _cut(self, tensors_of_source: Mapping[str, Sequence[Published]]) -> Iterator[tuple[Part, tuple[Part, int]]]:
        for held in self._store.parts():
            for tensor in tensors_of_source.get(held.name, ()) if held.kind == "weight" else ():
                start, stop = max(held.start, tensor.start), min(held.stop, tensor.stop)
                if start < stop:
                    part = Part(tensor.name, tensor.shape, held.kind, start - tensor.start, stop - tensor.start)
                    yield part, (held, tensor.start)

    def parts(self) -> Sequence[Part]:
        return list(self._held)

    def read(self, part: Part, start: int, out: Tensor) -> None:
        held, shift = self._held[part]
        self._store.read(held, start + shift, out)

    def view(self, part: Part) -> Tensor | None:
        held, shift = self._held[part]
        whole = self._store.view(held) if isinstance(self._store, ViewableStore) else None
        return None if whole is None else whole[part.start + shift - held.start :][: part.numel]


class PublishedStore(PublishedParts):
    """The weights of a store as parts of published tensors, for reading and writing."""

    def __init__(self, store: PartStore, published: Sequence[Published]) -> None:
        super().__init__(store, published)
        self._filled = store

    def write(self, part: Part, start: int, values: Tensor) -> None:
        held, shift = self._held[part]
        self._filled.write(held, start + shift, values)
