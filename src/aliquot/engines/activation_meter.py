"""How many bytes the forward pass keeps for the backward pass, with or without recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aliquot.models.recompute import keeps


class SavedBytes:
    """Most bytes that one forward pass saved for its backward, each storage once, parameters left out. On a GPU without
    what selective checkpointing keeps: torch compiles nothing while a dispatch mode looks on, and flex_attention
    must be."""

    def __init__(self, mode: Literal["none", "selective", "full"], device: str = "cpu") -> None:
        self._selective = mode == "selective" and device == "cpu"
        self.peak_bytes = 0
        self._measured = False

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measures the first forward pass only: the hooks cost time on every saved tensor."""
        if self._measured:
            yield
            return
        self._measured = True
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            # A gathered weight is saved as itself or as a view, `weight.t()`: it is no activation.
            if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        kept = _KeptBytes()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            kept if self._selective else nullcontext(),
        ):
            yield
        self.peak_bytes = max(self.peak_bytes, sum(storages.values()) + kept.total_bytes)


class _KeptBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Selective checkpointing keeps results in a store of its own, where saved-tensor hooks do not see them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if keeps(func):
            self.total_bytes += sum(t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result
