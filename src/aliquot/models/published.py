"""How a model's weights are published where that differs from how it holds them: an expert's matrices one by one, or
other names.

transformers knows it, as the conversion that `save_pretrained` reverts. What becomes of each weight is found by having
numbers converted that say where they were; a model of which a published tensor is not one range of one weight is
stored as it is held.
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

_SMALL = (4, 2)  # of the dimensions of an expert's matrix: what a conversion may halve, and tell from the other


@dataclass(frozen=True)
class Published:
    """A tensor as it is published: elements [start, start + numel) of weight `source`."""

    name: str
    shape: Shape
    source: str
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def published_of(model: nn.Module, tensors: Sequence[tuple[str, Shape]]) -> tuple[Published, ...] | None:
    """In the order of `tensors`. None: as they are held, or transformers' conversion is not one of ranges."""
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
    except Exception as error:  # a conversion that needs more than numbers
        _log.warning(
            "%s is stored as transformers holds it, not as it is published: its conversion fails on numbers (%s)",
            type(model).__name__,
            error,
        )
        return None
    if converted.keys() == numbers.keys() and all(converted[name].equal(numbers[name]) for name in numbers):
        return None
    found = []
    for name, values in converted.items():
        flat = values.reshape(-1)
        first = int(flat[0])
        start, end, source, shape, small = next(place for place in places if place[0] <= first < place[1])
        whole = Fraction(math.prod(shape), math.prod(small))
        dimensions = _scaled(tuple(values.shape), shape, small)
        at = (first - start) * whole
        if not bool((flat.diff() == 1).all()) or int(flat[-1]) >= end or dimensions is None or at.denominator != 1:
            return None
        found.append(Published(name, dimensions, source, int(at)))
    order = {name: number for number, (name, _) in enumerate(tensors)}
    found.sort(key=lambda each: (order[each.source], each.start))
    covered = sum(each.stop - each.start for each in found) == sum(math.prod(shape) for _, shape in tensors)
    return tuple(found) if covered else None


def _scaled(found: Shape, shape: Shape, small: Shape) -> Shape | None:
    """The shape of which `found` is what `small` is of `shape`, the first dimensions perhaps left out."""
    left_out = len(small) - len(found)
    if left_out < 0:
        return None
    scaled = [Fraction(f * of, s) for f, of, s in zip(found, shape[left_out:], small[left_out:], strict=True)]
    return tuple(map(int, scaled)) if all(each.denominator == 1 for each in scaled) else None


def tensors_of(published: Sequence[Published]) -> list[tuple[str, Shape]]:
    return [(each.name, each.shape) for each in published]


class PublishedParts:
    """The weights of a store as parts of what is published."""

    def __init__(self, store: PartSource, published: Sequence[Published]) -> None:
        self._store = store
        of_source: dict[str, list[Published]] = {}
        for each in published:
            of_source.setdefault(each.source, []).append(each)
        self._held = dict(self._cut(of_source))

    def _cut(self, of_source: Mapping[str, Sequence[Published]]) -> Iterator[tuple[Part, tuple[Part, int]]]:
        for held in self._store.parts():
            for each in of_source.get(held.name, ()) if held.kind == "weight" else ():
                start, stop = max(held.start, each.start), min(held.stop, each.stop)
                if start < stop:
                    part = Part(each.name, each.shape, held.kind, start - each.start, stop - each.start)
                    yield part, (held, each.start)

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
    """The same, to be filled."""

    def __init__(self, store: PartStore, published: Sequence[Published]) -> None:
        super().__init__(store, published)
        self._filled = store

    def write(self, part: Part, start: int, values: Tensor) -> None:
        held, shift = self._held[part]
        self._filled.write(held, start + shift, values)
