"""Throughput and remaining time: real tokens per second, model FLOP/s, MFU, bytes through network interfaces, ETA."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from aliquot.config.schema import RunConfig
from aliquot.core.intervals import is_due, times_due, times_either_due

Step = tuple[float, int, int, float]  # seconds, tokens, FLOP, seconds of waiting for a save
_NONE: Step = (0.0, 0, 0, 0.0)


@dataclass(frozen=True)
class Speed:
    """Rates over all ranks. `mfu` is a fraction of the compute ceiling; None if the ceiling is unknown."""

    tokens_per_s: float
    flops_per_s: float
    mfu: float | None


class Meter:
    """Measures the throughput of optimizer steps, each from `begin` to `end`. Work between steps does not count.

    Args:
        ceiling_flops_per_s: compute ceiling, the rate of plain matrix products on all ranks together.
        warmup_steps: number of first steps to discard once a later step ends, because they compile and fault pages in.
    """

    def __init__(
        self,
        ceiling_flops_per_s: float | None,
        warmup_steps: int = 1,
        window_steps: int = 10,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ceiling = ceiling_flops_per_s
        self._warmup_steps = warmup_steps
        self._clock = clock
        self._traffic = InterfaceTraffic()
        self._window: deque[Step] = deque(maxlen=window_steps)
        self._total: Step = _NONE
        self._steps = 0

    def begin(self) -> None:
        self._started_at = self._clock()

    def end(self, tokens: int, flops: int, saving_s: float = 0.0) -> None:
        """Count a step. `tokens`: real tokens of all ranks; `saving_s`: seconds of the step that waited for a save."""
        self._steps += 1
        if self._steps == self._warmup_steps + 1:
            self._window.clear()
            self._total = _NONE
        step = (self._clock() - self._started_at, tokens, flops, saving_s)
        self._window.append(step)
        self._total = _sum([self._total, step])

    @property
    def beats_ceiling(self) -> bool:
        mfu = self.recent().mfu
        return mfu is not None and mfu > 1

    def raise_ceiling(self, flops_per_s: float) -> None:
        """Use the higher of the old and a new measurement as the ceiling from now on."""
        self._ceiling = max(flops_per_s, self._ceiling or 0)

    def recent(self) -> Speed:
        """Return the speed over the last steps."""
        return self._speed(_sum(self._window))

    def overall(self) -> Speed:
        """Return the speed over all steps after the warm-up."""
        return self._speed(self._total)

    def steps_s(self, steps_left: int) -> float | None:
        """Estimate the seconds of `steps_left` steps at the recent pace, without waits for saves."""
        if not self._window:
            return None
        return steps_left * sum(seconds - saving_s for seconds, _, _, saving_s in self._window) / len(self._window)

    def readings(self) -> dict[str, Any]:
        """Return the recent speed and the bytes through this machine's network interfaces as metrics."""
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


class RemainingWork:
    """Estimates the time of remaining evaluations, saves and export: from the plan, then from their last duration."""

    def __init__(self, config: RunConfig, total_steps: int, plan: Mapping[str, Any]) -> None:
        """Args: plan: in the form of `aliquot plan --json`, or empty."""
        self._total = total_steps
        self._eval_steps, self._best_steps = config.train.eval_steps, config.best_steps
        self._save_steps = config.checkpoint.save_steps
        due = is_due(self._save_steps, total_steps) or is_due(self._best_steps, total_steps)
        self._saves_last = config.checkpoint.last or config.checkpoint.best or due
        self._save_s = self.stall_s = float(plan.get("save_s", 0.0))
        if config.checkpoint.asynchronous:
            self.stall_s = float(plan.get("stall_s", 0.0)) / max(1, plan.get("saves_beside", 1))
        self._export_s = float(plan.get("export_s", 0.0))
        self.evaluation_s = float(plan.get("evaluation_s", 0.0))

    def saved(self, seconds: float, stall_s: float) -> None:
        """Record a save that took `seconds`. Training waited for `stall_s` of them."""
        self._save_s, self.stall_s = seconds, stall_s

    def seconds(self, done: int) -> float:
        """Estimate the seconds of evaluations, saves and export from the end of step `done` to the end of the run.

        With `checkpoint.best`, every evaluation counts as an improvement that causes a save.
        """
        begun = max(0, done - 1)
        evaluations = times_due(self._eval_steps, self._total) - times_due(self._eval_steps, begun, last=False)
        all_saves, done_saves = (
            times_either_due(self._save_steps, self._best_steps, min(steps, self._total - 1))
            for steps in (self._total, begun)
        )
        last_s = self._save_s if self._saves_last else 0.0
        return evaluations * self.evaluation_s + (all_saves - done_saves) * self.stall_s + last_s + self._export_s


def attention_pairs(lengths: npt.ArrayLike, window: int | None = None) -> int:
    """Count the (query, key) pairs of causal attention within documents. A query attends to at most `window` keys."""
    tokens = np.asarray(lengths, np.int64)
    hidden = np.maximum(0, tokens - window) if window is not None else np.zeros_like(tokens)
    return int((tokens * (tokens + 1) - hidden * (hidden + 1)).sum()) // 2


def model_flops(
    matmul_flops: int, tokens: int, lengths: npt.ArrayLike, attention_widths: Mapping[int | None, int]
) -> int:
    """Count the FLOP of forward and backward pass over real tokens, without recomputation: the numerator of MFU.

    PaLM (Chowdhery et al. 2022, appendix B) counts 6 N + 12 L H Q T per token. N weights in matrix products cost 2 N
    forward and 4 N backward. Attention to each of T keys costs 4 L H Q forward (scores and values) and 8 L H Q
    backward. Here N excludes the input embedding, because a look-up has no products. Gradients of frozen weights do
    not count either. T is the number of keys that a causal query attends to within its document and window.

    Args:
        matmul_flops: FLOP per token in all products with weights (models/meta.py).
        lengths: the lengths of the documents.
        attention_widths: attention window -> layers x heads x head size, over the layers with this window.
    """
    attention = sum(width * attention_pairs(lengths, window) for window, width in attention_widths.items())
    return matmul_flops * tokens + 12 * attention


class InterfaceTraffic:
    """Counts the bytes that all processes send and receive through each network interface of this machine."""

    def __init__(self) -> None:
        self._start = _interfaces()

    def readings(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the metric `interface_bytes`: bytes since the start, for each interface with traffic."""
        moved = {
            name: {direction: count - self._start.get(name, {}).get(direction, 0) for direction, count in now.items()}
            for name, now in _interfaces().items()
        }
        return {"interface_bytes": {name: counts for name, counts in moved.items() if any(counts.values())}}


def _interfaces() -> dict[str, dict[str, int]]:
    """Return the bytes received and sent by each interface since it was created."""
    try:
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
    except FileNotFoundError:  # a sandbox may lack /proc/net
        return {}
    return {name: {"received": now.bytes_recv, "sent": now.bytes_sent} for name, now in counters.items()}
