"""Sharded initialisation: the same weights whatever the world size, each rank drawing only what it needs.

transformers' own `_init_weights` runs once on the meta device while a dispatch mode writes down which in-place
operation it makes on which parameter. Those operations are then replayed on fixed blocks of rows, each block with a
generator seeded by (seed, name, block), so that any rank can draw any block alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aliquot.errors import UnsupportedModelError
from aliquot.models.materialise import compute_buffers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aliquot.ranges.parts import PartStore

# A block holds whole rows and about this many values: 4 MiB in fp32.
BLOCK_NUMEL = 1 << 20
# These overwrite whatever was there, so that nothing recorded before them needs replaying.
OVERWRITING = ("normal_", "uniform_", "fill_", "zero_")


@dataclass(frozen=True)
class Fill:
    """One in-place operation with plain arguments on elements [start, stop) of a weight."""

    operation: str
    arguments: tuple[Any, ...]
    start: int
    stop: int


Fills = Mapping[str, tuple[Fill, ...]]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every in-place operation on a meta tensor by the storage it changes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[tuple[Tensor, Fill | str]] = []  # a str: why it cannot be replayed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        writes = schema.arguments and schema.arguments[0].alias_info and schema.arguments[0].alias_info.is_write
        if writes and args[0].is_meta:
            target, operation = args[0], schema.name.removeprefix("aten::")
            arguments = tuple(args[1:])
            if not target.is_contiguous():
                self.written.append((target, f"{operation} on a strided view"))
            elif any(isinstance(argument, torch.Tensor) for argument in arguments):
                self.written.append((target, f"{operation} of computed values"))
            else:
                start = int(target.storage_offset())
                fill = Fill(operation, arguments, start, start + target.numel())
                self.written.append((target, fill))
        return result


def record(model: PreTrainedModel) -> Fills:
    """Run the model's own weight initialisation on meta parameters; fill its non-persistent buffers for real.

    Returns the fills of every parameter by name. Raises UserError if a parameter is left out or is filled in a way
    that cannot be replayed in blocks.
    """
    owned: set[Tensor] = set()
    for module in model.modules():
        # transformers marks modules as done while it builds them; this pass is the one that counts. A head that is
        # tied to the embedding stays marked: transformers ties after it initialises, and the embedding's values win.
        weights = set(module.parameters(recurse=False))
        if weights and weights <= owned:
            vars(module)["_is_hf_initialized"] = True
        else:
            vars(module).pop("_is_hf_initialized", None)
        owned |= weights
    compute_buffers(model)
    with _Recorder() as recorder, torch.no_grad():
        model.initialize_weights()

    name_of_storage = {_storage(parameter): name for name, parameter in model.named_parameters()}
    fills: dict[str, list[Fill]] = {name: [] for name, _ in model.named_parameters()}
    for target, fill in recorder.written:
        name = name_of_storage.get(_storage(target))
        if name is None:
            continue
        if isinstance(fill, str):
            raise UnsupportedModelError(
                f"{type(model).__name__}: initialises {name} by {fill}: cannot be drawn in blocks"
            )
        numel = model.get_parameter(name).numel()
        if fill.operation in OVERWRITING and (fill.start, fill.stop) == (0, numel):
            fills[name].clear()
        fills[name].append(fill)
    bare = [name for name, found in fills.items() if not found]
    if bare:
        raise UnsupportedModelError(f"{type(model).__name__}: does not initialise {', '.join(bare[:5])}: not supported")
    return {name: tuple(found) for name, found in fills.items()}


def initialize(store: PartStore, fills: Fills, seed: int) -> None:
    """Fill the weight parts that `store` owns; moments are left alone."""
    for part in store.parts():
        if part.kind != "weight":
            continue
        for index, start, stop in blocks(part.shape, part.start, part.stop):
            values = draw(fills[part.name], seed, part.name, index, start, stop)
            first, last = max(start, part.start), min(stop, part.stop)
            store.write(part, first, values[first - start : last - start])


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(index, start, stop) of the blocks of whole rows that meet elements [start, stop) of a tensor of `shape`."""
    numel = torch.Size(shape).numel()
    row = numel // shape[0] if shape and shape[0] else 1
    size = max(1, BLOCK_NUMEL // max(row, 1)) * max(row, 1)
    for index in range(start // size, -(-stop // size)):
        yield index, index * size, min((index + 1) * size, numel)


def draw(fills: tuple[Fill, ...], seed: int, name: str, index: int, start: int, stop: int) -> Tensor:
    """Elements [start, stop), one whole block of the weight `name`, as flat fp32 on CPU."""
    digest = hashlib.sha256(f"{seed}:{name}:{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    values = torch.zeros(stop - start)
    for fill in fills:
        first, last = max(fill.start, start), min(fill.stop, stop)
        if first >= last:
            continue
        view = values[first - start : last - start]
        if fill.operation in ("normal_", "uniform_"):
            getattr(view, fill.operation)(*fill.arguments, generator=generator)
        else:
            getattr(view, fill.operation)(*fill.arguments)
    return values


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
