"""How fast training is: real tokens per second, model FLOP/s, MFU and the time that the steps left take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.config.schema import RunConfig
from aliquot.core.intervals import is_due, times_due, times_either_due

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


class Remaining:
    """Seconds of each as it took last; before that as the plan foresaw it."""

    def __init__(self, config: RunConfig, total_steps: int, plan: Mapping[str, Any]) -> None:
        """`plan`: as `aliquot plan --json` prints it, or empty."""
        self._total = total_steps
        self._eval_steps, self._save_steps = config.train.eval_steps, config.checkpoint.every
        self._best_steps = config.train.eval_steps if config.checkpoint.best else 0
        waits = not config.checkpoint.asynchronous
        due = is_due(self._save_steps, total_steps) or is_due(self._best_steps, total_steps)
        self._saves_last = config.checkpoint.last or config.checkpoint.best or due
        self._save_s = float(plan.get("save_s", 0.0))
        self._export_s = float(plan.get("export_s", 0.0))
        self.evaluation_s = float(plan.get("evaluation_s", 0.0))
        self.stall_s = self._save_s
        if not waits:
            self.stall_s = float(plan.get("stall_s", 0.0)) / max(1, plan.get("saves_beside", 1))

    def saved(self, seconds: float, stall_s: float) -> None:
        """A checkpoint took so long, of which training stood still for `stall_s`."""
        self._save_s, self.stall_s = seconds, stall_s

    def seconds(self, done: int) -> float:
        """After `done` steps, before what is due then; as if each evaluation were the best so far, where that one is
        kept."""
        begun = max(0, done - 1)
        evaluations = times_due(self._eval_steps, self._total) - times_due(self._eval_steps, begun, last=False)
        between = self._saves(self._total - 1) - self._saves(min(begun, self._total - 1))
        last_s = self._save_s if self._saves_last else 0.0
        return evaluations * self.evaluation_s + between * self.stall_s + last_s + self._export_s

    def _saves(self, steps: int) -> int:
        return times_either_due(self._save_steps, self._best_steps, steps)


def attention_pairs(lengths: npt.ArrayLike, window: int | None = None) -> int:
    """(query, key) pairs of causal attention inside documents of these lengths; a query sees `window` keys at most."""
    of_document = np.asarray(lengths, np.int64)
    unseen = np.maximum(0, of_document - window) if window is not None else np.zeros_like(of_document)
    return int((of_document * (of_document + 1) - unseen * (unseen + 1)).sum()) // 2


def model_flops(
    matmul_flops: int, tokens: int, lengths: npt.ArrayLike, attention_widths: Mapping[int | None, int]
) -> int:
    """Forward and backward of `tokens` real tokens in documents of `lengths`. `matmul_flops`: of a token in all
    products with weights (models/structure.py); `attention_widths` is layers x heads x head size, by the window of
    those layers.

    PaLM (Chowdhery et al. 2022, appendix B) counts 6 N + 12 L H Q T a token: 2 N forward and twice that backward for
    N weights in matrix products, and for attention 4 L H Q forward (scores and values) for each of T keys, three times
    that with backward. Here N leaves out the input embedding, which is a look-up, and the gradients of weights that
    learn nothing; T is replaced by the keys that a causal query really has inside its own document and window.
    Recomputation is not counted.
    """
    attention = sum(width * attention_pairs(lengths, window) for window, width in attention_widths.items())
    return matmul_flops * tokens + 12 * attention


class InterfaceTraffic:
    """Bytes through each network interface of this machine since this was made, whoever sent them."""

    def __init__(self, file: Path = Path("/proc/net/dev")) -> None:
        self._file = file
        self._start = read_interfaces(file)

    def readings(self) -> dict[str, dict[str, dict[str, int]]]:
        """As a metric; interfaces that nothing went through are left out."""
        moved = {}
        for name, (received, sent) in read_interfaces(self._file).items():
            before = self._start.get(name, (0, 0))
            since = {"received": received - before[0], "sent": sent - before[1]}
            if any(since.values()):
                moved[name] = since
        return {"interface_bytes": moved}


def read_interfaces(file: Path = Path("/proc/net/dev")) -> dict[str, tuple[int, int]]:
    """Bytes received and sent by each interface since it came up; empty where the kernel does not tell."""
    interfaces = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        name, colon, counts = line.partition(":")
        if colon:
            words = counts.split()
            interfaces[name.strip()] = (int(words[0]), int(words[8]))
    return interfaces
