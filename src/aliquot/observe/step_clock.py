"""Divide the seconds of a step among its parts, and find ranks that delay the others.

Each moment belongs to exactly one part. Parts end on the host's clock or, for kernels, in the stream of a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

PARTS = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint", "wait")
OWN_WORK = ("data", "forward", "backward", "reduce", "optimizer")  # parts in which a rank waits for no other rank


class Timeline(Protocol):
    def mark(self) -> Any:
        """Mark the current time, after all kernels that were launched before."""
        ...

    def passed(self, mark: Any) -> bool:
        """Return whether the time of the mark is known. Does not block."""
        ...

    def wait(self, mark: Any) -> None:
        """Wait until the time of the mark is known."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Return the seconds between two marks with known times."""
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
    """Marks in the stream of kernels, because the host runs ahead of the kernels that it launches.

    An idle GPU passes a mark at once, so the time of work on the host counts too.
    """

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
    """Return the timeline of a rank that computes on `device`."""
    return CudaEvents() if device == "cuda" else WallClock()


class StepClock:
    """Measures the parts of each step: time after `enter` belongs to that part, except the engine's collectives.

    Args:
        engine_times: returns the seconds that the engine has spent in reductions (None: it does not measure them) and
            in waiting for other ranks within them.
        timeline: marks the ends of parts; on a GPU a part ends after the kernels that it launched.

    Attributes:
        annotate: opens a named range in a profile around each part.
    """

    def __init__(
        self, engine_times: Callable[[], tuple[float | None, float]], timeline: Timeline | None = None
    ) -> None:
        self._engine_times = engine_times
        self._timeline = timeline or WallClock()
        # Parts with an end that is not known yet: their two marks, and the seconds that belong to other parts.
        self._open: deque[tuple[str, Any, Any, float]] = deque()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.reduce_known = True
        self._part: str | None = None
        self._since: tuple[Any, float, float] = (None, 0.0, 0.0)  # a mark, reduced, waited
        self.annotate: Callable[[str], AbstractContextManager[object]] | None = None
        self._range: AbstractContextManager[object] | None = None

    def enter(self, part: str) -> None:
        now = self._now()
        self._close(now)
        self._part, self._since = part, now
        if self.annotate is not None:
            self._range = self.annotate(part)
            self._range.__enter__()

    def leave(self) -> None:
        """End the part; time until the next `enter` belongs to no part."""
        self._close(self._now())

    def _close(self, now: tuple[Any, float, float]) -> None:
        if self._part is None:
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        (mark, *times), (since, *times_before) = now, self._since
        reduced, waited = (after - before for after, before in zip(times, times_before, strict=True))
        self._seconds["reduce"] += reduced
        self._seconds["wait"] += waited
        self._open.append((self._part, since, mark, reduced + waited))
        self._part = None

    def ended(self, phase: str) -> None:
        """Change the part after "forward" or "backward" of a micro-batch; between steps (a self-test) do nothing."""
        if self._part is not None:
            self.enter("backward" if phase == "forward" else "forward")

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part up to the last mark with a known time. Does not block."""
        while self._open and self._timeline.passed(self._open[0][2]):
            part, first, last, excluded_s = self._open.popleft()
            self._seconds[part] += self._timeline.seconds(first, last) - excluded_s
        return dict(self._seconds)

    def synchronized_seconds(self) -> dict[str, float]:
        """Wait for the last mark and return `seconds`: for the moment of a step that waits for the GPU anyway."""
        if self._open:
            self._timeline.wait(self._open[-1][2])
        return self.seconds()

    def _now(self) -> tuple[Any, float, float]:
        reduced, waited = self._engine_times()
        self.reduce_known = reduced is not None
        return self._timeline.mark(), reduced or 0.0, waited


class SlowRanks:
    """Finds ranks whose own work per token takes longer than the median rank's, over the last `window_steps` steps."""

    def __init__(self, window_steps: int = 20, ratio: float = 1.2) -> None:
        self._ratio = ratio
        self.window_steps = window_steps
        self._window: deque[list[tuple[float, int]]] = deque(maxlen=window_steps)

    def add(self, own_work: Sequence[tuple[float, int]]) -> None:
        """Add a step: for each rank the seconds of its own work, and the number of its tokens."""
        self._window.append(list(own_work))

    def slowdowns(self) -> dict[int, float]:
        """Return the slow ranks with their time per token relative to the median; empty until the window is full.

        Ranks without tokens in the window only join the collectives and do not count.
        """
        if len(self._window) < self.window_steps:
            return {}
        pace = {}
        for rank in range(len(self._window[-1])):
            tokens = sum(step[rank][1] for step in self._window)
            if tokens:
                pace[rank] = sum(step[rank][0] for step in self._window) / tokens
        median = statistics.median_low(pace.values()) if pace else 0.0
        return {rank: time / median for rank, time in pace.items() if median > 0 and time > self._ratio * median}
