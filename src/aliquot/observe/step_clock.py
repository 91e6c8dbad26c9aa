"""Where the seconds of a step go on this rank: each moment belongs to exactly one part."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

PARTS = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint", "wait")
OWN_WORK = ("data", "forward", "backward", "reduce", "optimizer")  # what makes a rank slow; no other rank is waited for


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


class StepClock:
    """`enter` a part, and what follows belongs to it, but for the time that the engine says went into reducing.

    A part ends where `timeline` marks it: behind the kernels that it has launched, where a GPU runs them.
    `inside` returns the seconds that the engine has spent so far in sums and collectives (None: not told apart) and in
    waiting for other ranks inside them. `annotate` opens a named range in a profile around each part.
    """

    def __init__(self, inside: Callable[[], tuple[float | None, float]], timeline: Timeline | None = None) -> None:
        self._inside = inside
        self._timeline = timeline or WallClock()
        # Parts whose end was not passed yet: their two marks, and what of them is not theirs.
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
        """What follows belongs to no part until the next `enter`."""
        self._close(self._now())

    def _close(self, now: tuple[Any, float, float]) -> None:
        if self._part is None:
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        (mark, *inside), (since, *inside_before) = now, self._since
        reduced, waited = (at - before for at, before in zip(inside, inside_before, strict=True))
        self._seconds["reduce"] += reduced
        self._seconds["wait"] += waited
        self._open.append((self._part, since, mark, reduced + waited))
        self._part = None

    def ended(self, phase: str) -> None:
        """The engine ended "forward" or "backward" of a micro-batch; between steps (a self-test) nothing is counted."""
        if self._part is not None:
            self.enter("backward" if phase == "forward" else "forward")

    def seconds(self) -> dict[str, float]:
        """By part, since the clock was made, up to the last `enter` or `leave` that a GPU has passed, if there is one.
        Waits for nothing."""
        while self._open and self._timeline.passed(self._open[0][2]):
            part, first, last, of_others = self._open.popleft()
            self._seconds[part] += self._timeline.seconds(first, last) - of_others
        return dict(self._seconds)

    def waited(self) -> dict[str, float]:
        """`seconds` up to the last `enter` or `leave`: for the moment in a step at which a GPU has been waited for."""
        if self._open:
            self._timeline.wait(self._open[-1][2])
        return self.seconds()

    def _now(self) -> tuple[Any, float, float]:
        reduced, waited = self._inside()
        self.reduce_known = reduced is not None
        return self._timeline.mark(), reduced or 0.0, waited


class SlowRanks:
    """Compares ranks over the last `window_steps` steps; of an even number, with the faster one in the middle."""

    def __init__(self, window_steps: int = 20, ratio: float = 1.2) -> None:
        self._ratio = ratio
        self.window_steps = window_steps
        self._window: deque[list[tuple[float, int]]] = deque(maxlen=window_steps)

    def add(self, own_work: Sequence[tuple[float, int]]) -> None:
        """A step is done; [rank]: the seconds of its own work, and the tokens that it computed."""
        self._window.append(list(own_work))

    def found(self) -> dict[int, float]:
        """rank -> how many times slower than the median it is; empty before the window is full.

        A rank without tokens in the window only joins the collectives and is left out.
        """
        if len(self._window) < self.window_steps:
            return {}
        pace = {}
        for rank in range(len(self._window[-1])):
            tokens = sum(step[rank][1] for step in self._window)
            if tokens:
                pace[rank] = sum(step[rank][0] for step in self._window) / tokens
        median = statistics.median_low(pace.values()) if pace else 0.0
        return {rank: own / median for rank, own in pace.items() if median > 0 and own > self._ratio * median}
