"""Some of a store: what an adapter's checkpoint holds beside a model that it does not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from aliquot.tensor_io.parts import Part, PartStore
from aliquot.tensor_io.transfer import InMemory

if TYPE_CHECKING:
    from torch import Tensor


class ChosenParts:
    """The parts of `store` that belong to tensors of these names."""

    def __init__(self, store: PartStore, names: Collection[str]) -> None:
        self._store = store
        self._parts = [part for part in store.parts() if part.name in names]

    def parts(self) -> Sequence[Part]:
        return self._parts

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._store.read(part, start, out)

    def write(self, part: Part, start: int, values: Tensor) -> None:
        self._store.write(part, start, values)

    def view(self, part: Part) -> Tensor | None:
        return self._store.view(part) if isinstance(self._store, InMemory) else None
