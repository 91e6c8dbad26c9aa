"""Marks in time: on the host's clock, or in the stream of kernels of a GPU, which passes them later."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Timeline(Protocol):
    def mark(self) -> Any:
        """Now, behind all that was launched before."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether it is known when that was. Waits for nothing."""
        ...

    def wait(self, mark: Any) -> None:
        """Return when it is."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """From one mark to another, both passed."""
        ...


@dataclass(frozen=True)
class WallClock:
    now: Callable[[], float] = time.perf_counter

    def mark(self) -> float:
        return self.now()

    def passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaEvents:
    """A host that launches kernels runs ahead of them: what they take is measured where they run. While a GPU has
    nothing to do it passes a mark at once, so that what the host alone does counts too."""

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def seconds(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3


def timeline_of(device: str) -> Timeline:
    """Of a rank that computes on `device`."""
    return CudaEvents() if device == "cuda" else WallClock()
