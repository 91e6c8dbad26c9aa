"""Where the seconds of a step go on this rank: each moment belongs to exactly one part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from aliquot.observe.timeline import Timeline, WallClock

PARTS = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint", "wait")
OWN_WORK = ("data", "forward", "backward", "reduce", "optimizer")  # what makes a rank slow; no other rank is waited for


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
