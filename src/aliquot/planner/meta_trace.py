"""Trace a forward or backward pass: live storages, matrix products, bytes moved, and number of operations."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aliquot.nn.attention.tiled_attention import attended_alone
from aliquot.planner.micro_batch_cost import Work, Works

# Operations that torch does not tag as elementwise, but that Inductor computes in the same loops.
_FUSED = ("aten::mean", "aten::sum", "aten::cat", "aten::_to_copy", "aten::copy_", "aten::slice_backward")


def fuses(func: Any) -> bool:
    """Whether torch.compile fuses the operation with its neighbours."""
    return torch.Tag.pointwise in func.tags or func._schema.name in _FUSED


class FusedRun:
    """Successive operations that torch.compile fuses into one pass over memory.

    The fused pass reads each earlier storage once, and writes only storages that outlive the pass.
    """

    def __init__(self) -> None:
        self._read: dict[int, int] = {}  # storage -> bytes
        self._written: dict[int, int] = {}
        self._largest = 0

    def add(self, inputs: dict[int, int], outputs: dict[int, int]) -> None:
        """Add an operation. `inputs`, `outputs`: storage -> bytes; a storage written in place is in both."""
        self._read |= {key: size for key, size in inputs.items() if key not in self._written}
        self._written |= outputs
        self._largest = max(self._largest, *inputs.values(), *outputs.values(), 0)

    def moved(self, alive: set[int]) -> tuple[int, int]:
        """Return (bytes of the largest tensor, bytes moved), given the storages that outlive the fused pass."""
        return self._largest, sum(self._read.values()) + sum(
            self._written[key] for key in self._written if key in alive
        )


_PRODUCTS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.mm.out: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
}

Product = tuple[int, int, int, bool, bool]  # m, k, n of [m, k] x [k, n]; whether the rows of each factor are contiguous


class MetaTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of operations, and live and peak bytes of storages on `device` without `weights`."""

    def __init__(self, weights: Iterable[Tensor], device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._repeats = 1.0  # how often an operation counts
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._ignored = {_storage(weight): weight for weight in weights}
        self._work: Work = defaultdict(float)  # of eager operations
        self._compiled: Work = defaultdict(float)  # as if the operations during `fusing` were compiled
        self.fusing = False
        self._run = FusedRun()
        self.products: set[Product] = set()  # without the products of attention, which are batched

    def ignore(self, weight: Tensor) -> None:
        """Exclude a tensor from the live bytes, because another part of the plan counts this tensor."""
        self._free(_storage(weight), weight.untyped_storage().nbytes())
        self._ignored[_storage(weight)] = weight

    def take_work(self) -> Works:
        """Return the work since the last call."""
        self._end_run()
        works = self._work, self._compiled
        self._work, self._compiled = defaultdict(float), defaultdict(float)
        return works

    def two_for_all(self, starts: range) -> Iterator[int]:
        """Run two iterations of a loop over rows instead of thousands; the first counts as all iterations but one.

        One iteration would not show the peak, because tensors of the first are still alive in the second.
        """
        self._repeats = max(1.0, (starts.stop - starts.start) / starts.step - 1)
        for start in starts[:2]:
            yield start
            self._repeats = 1.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aliquot.tiled_attention.default:
            with self:  # count the operations inside
                return attended_alone(*args)
        result = func(*args, **(kwargs or {}))
        outputs = self._tensors(result)
        self._count(func, args, kwargs or {}, outputs)
        for output in outputs:
            self._see(output)
        return result

    def _see(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key in self._alive or key in self._ignored:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.largest_bytes = max(self.largest_bytes, size)

    def _free(self, key: int, size: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.live_bytes -= size

    def _count(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        inputs = self._tensors((args, kwargs))
        aliases = not func._schema.is_mutable and all(_storage(t) in map(_storage, inputs) for t in outputs)
        tallies = [self._work]
        a_view = aliases and outputs != []
        if not self.fusing or not (a_view or fuses(func)):
            self._end_run()
            tallies.append(self._compiled)
        elif not a_view:  # views cost compiled code nothing
            self._run.add(
                *({_storage(t): t.numel() * t.element_size() for t in tensors} for tensors in (inputs, outputs))
            )
        for key, amount in self._costs(func, args, inputs, outputs, aliases):
            for tally in tallies:
                tally[key] += self._repeats * amount

    def _costs(
        self, func: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor], aliases: bool
    ) -> Iterator[tuple[tuple[Any, ...], float]]:
        yield ("calls",), 1
        if func in _PRODUCTS:
            left, right = (args[at] for at in _PRODUCTS[func])
            batch = left.shape[0] if left.ndim == 3 else 1
            m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
            yield ("matmul", batch, m, k, n, left.element_size()), 1
            if left.ndim == 2:
                self.products.add((m, k, n, left.stride(1) == 1, right.stride(1) == 1))
        elif outputs and not aliases and not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            moved = [*{id(t): t for t in (*inputs, *outputs)}.values()]
            sizes = [tensor.numel() * tensor.element_size() for tensor in moved]
            yield ("memory", _operation(func, moved), max(sizes)), sum(sizes)

    def _end_run(self) -> None:
        largest, moved = self._run.moved({*self._alive, *self._ignored})
        if moved:
            self._compiled["memory", "fused", largest] += self._repeats * moved
            self._compiled["calls",] += self._repeats
            self._run = FusedRun()

    def _tensors(self, tree: Any) -> list[Tensor]:
        """Return the tensors in nested tuples, lists and dicts."""
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.device.type == self._device]


def _operation(func: Any, moved: list[Tensor]) -> str:
    """Return the name of an operation for `Rates`: copies that convert or reorder are slower than plain copies."""
    name: str = func._schema.name.removeprefix("aten::")
    if name not in ("copy_", "_to_copy", "clone"):
        return name
    matrices = [tensor for tensor in moved if tensor.ndim > 1]
    if any(tensor.stride(-1) != 1 < tensor.shape[-1] for tensor in matrices):
        return "transpose"
    if len({tensor.dtype for tensor in moved}) > 1:
        return "convert"
    return "permute" if any(not tensor.is_contiguous() for tensor in moved) else name


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
