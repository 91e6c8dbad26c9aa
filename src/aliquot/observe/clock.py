"""Where the seconds of a step go on this rank: each moment belongs to exactly one part."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

PARTS = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint", "wait")
OWN_WORK = ("data", "forward", "backward", "reduce", "optimizer")  # what makes a rank slow; no other rank is waited for


class StepClock:
    """`enter` a part, and what follows belongs to it, but for the time that the engine says went into reducing.

    `inside` returns the seconds that the engine has spent so far in sums and collectives (None: not told apart) and in
    waiting for other ranks inside them. `annotate` opens a named range in a profile around each part.
    """

    def __init__(
        self, inside: Callable[[], tuple[float | None, float]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._inside = inside
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.reduce_known = True
        self._part: str | None = None
        self._since = (0.0, 0.0, 0.0)  # the clock, reduced, waited
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

    def _close(self, now: tuple[float, float, float]) -> None:
        if self._part is None:
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        passed, reduced, waited = (at - since for at, since in zip(now, self._since, strict=True))
        self._seconds["reduce"] += reduced
        self._seconds["wait"] += waited
        self._seconds[self._part] += passed - reduced - waited
        self._part = None

    def ended(self, phase: str) -> None:
        """The engine ended "forward" or "backward" of a micro-batch; between steps (a self-test) nothing is counted."""
        if self._part is not None:
            self.enter("backward" if phase == "forward" else "forward")

    def seconds(self) -> dict[str, float]:
        """By part, since the clock was made, up to the last `enter` or `leave`."""
        return dict(self._seconds)

    def _now(self) -> tuple[float, float, float]:
        reduced, waited = self._inside()
        self.reduce_known = reduced is not None
        return self._clock(), reduced or 0.0, waited
