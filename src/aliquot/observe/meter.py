"""How fast training is: real tokens per second, model FLOP/s, MFU and the time that the steps left take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from aliquot.observe.interface_traffic import InterfaceTraffic

Step = tuple[float, int, int, float]  # its seconds, tokens and FLOP; of the seconds, those of waiting for a save
_NONE: Step = (0.0, 0, 0, 0.0)


@dataclass(frozen=True)
class Speed:
    """Over all ranks. `mfu` is a fraction of the ceiling, or None where the ceiling is not known."""

    tokens_per_s: float
    flops_per_s: float
    mfu: float | None


class Meter:
    """Call `begin` and `end` around each optimizer step; what happens in between steps (evaluation) is not counted.

    `ceiling_flops_per_s` is the matmul rate of all ranks together. The first `warmup_steps` compile and fault pages in
    and are left out wherever a later step exists.
    """

    def __init__(
        self,
        ceiling_flops_per_s: float | None,
        warmup_steps: int = 1,
        window_steps: int = 10,
        clock: Callable[[], float] = time.perf_counter,
        traffic: InterfaceTraffic | None = None,
    ) -> None:
        self._ceiling = ceiling_flops_per_s
        self._warmup_steps = warmup_steps
        self._clock = clock
        self._traffic = traffic or InterfaceTraffic()
        self._window: deque[Step] = deque(maxlen=window_steps)
        self._total: Step = _NONE
        self._steps = 0

    def begin(self) -> None:
        self._begun = self._clock()

    def end(self, tokens: int, flops: int, saving_s: float = 0.0) -> None:
        """A step over `tokens` real tokens of all ranks, which needed `flops` operations, is done; of its seconds it
        waited for a save for `saving_s`."""
        self._steps += 1
        if self._steps == self._warmup_steps + 1:
            self._window.clear()
            self._total = _NONE
        step = (self._clock() - self._begun, tokens, flops, saving_s)
        self._window.append(step)
        self._total = _sum([self._total, step])

    @property
    def beats_ceiling(self) -> bool:
        mfu = self.recent().mfu
        return mfu is not None and mfu > 1

    def raise_ceiling(self, flops_per_s: float) -> None:
        """It was measured again: the higher one is the ceiling, of what is read from now on."""
        self._ceiling = max(flops_per_s, self._ceiling or 0)

    def recent(self) -> Speed:
        """Over the last steps."""
        return self._speed(_sum(self._window))

    def overall(self) -> Speed:
        """Over all steps after the warm-up."""
        return self._speed(self._total)

    def steps_s(self, steps_left: int) -> float | None:
        """Seconds that so many more steps take at the recent pace, but for their waiting for saves."""
        if not self._window:
            return None
        return steps_left * sum(seconds - saving_s for seconds, _, _, saving_s in self._window) / len(self._window)

    def readings(self) -> dict[str, Any]:
        """The recent pace as metrics, and what has gone through this machine's network interfaces since the start."""
        return {**asdict(self.recent()), **self._traffic.readings()}

    def _speed(self, total: Step) -> Speed:
        seconds, tokens, flops, _ = total
        if seconds == 0:
            return Speed(float("nan"), float("nan"), None)
        flops_per_s = flops / seconds
        return Speed(tokens / seconds, flops_per_s, flops_per_s / self._ceiling if self._ceiling else None)


def _sum(steps: Iterable[Step]) -> Step:
    seconds, tokens, flops, saving_s = zip(_NONE, *steps, strict=True)
    return sum(seconds), sum(tokens), sum(flops), sum(saving_s)
