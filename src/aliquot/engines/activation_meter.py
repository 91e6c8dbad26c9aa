"""Measure the bytes that a forward pass saves for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aliquot.models.backward_pass import is_kept


class ActivationMeter:
    """Measure the bytes that a forward pass saves for the backward pass. Each storage counts once, parameters never.

    On a GPU, the results that selective checkpointing saves are not counted. Counting them needs a dispatch mode, under
    which torch.compile does not run, and flex_attention must be compiled.
    """

    def __init__(self, mode: Literal["none", "selective", "full"], device: str = "cpu") -> None:
        self._counts_selective = mode == "selective" and device == "cpu"
        self.peak_bytes = 0
        self._measured = False

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the first forward pass only, because the hooks cost time for every saved tensor."""
        if self._measured:
            yield
            return
        self._measured = True
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            # Autograd also saves gathered weights, as parameters or views (`weight.t()`). Weights are no activations.
            if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        selective = _SelectiveResults()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            selective if self._counts_selective else nullcontext(),
        ):
            yield
        self.peak_bytes = max(self.peak_bytes, sum(storages.values()) + selective.total_bytes)


class _SelectiveResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes that selective checkpointing stores itself, because saved-tensor hooks miss these bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_kept(func):
            self.total_bytes += sum(t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result
