"""Which rank holds the others up: its own work for a token takes longer than the others' does."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence


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
