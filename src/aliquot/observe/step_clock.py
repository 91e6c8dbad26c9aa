"""Measure the time of each part of a step, trace steps with torch.profiler, and find slow ranks.

Each moment of a step belongs to exactly one part. The clock of the host measures when parts end. On a GPU, CUDA events
measure when the kernels of a part end.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliquot.core.errors import StorageError, writing
from aliquot.core.small_files import publish_text

if TYPE_CHECKING:
    import torch.profiler

PARTS = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint", "wait")
OWN_WORK = ("data", "forward", "backward", "reduce", "optimizer")  # parts in which a rank does not wait for other ranks
_SKIPPED_STEPS = 2  # not traced, because they compile and fault pages in
_MAX_OPERATORS = 40
_SLOW = 1.2  # times the median time per token


class HostMark:
    """A moment of the host's clock, with the methods of torch.cuda.Event. Its time is known at once."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._at = now()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: HostMark) -> float:
        """Return the milliseconds from this mark to `end`."""
        return 1e3 * (end._at - self._at)


def cuda_mark() -> Any:
    """Mark the time after all kernels that were launched before, because the host runs ahead of them.

    An idle GPU passes an event at once, so that work of the host counts, too.
    """
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class StepClock:
    """Measures the time of each part of a step.

    The time after `enter(part)` belongs to `part`, except for reductions and waits of the engine.

    Args:
        engine_times: returns the total seconds that the engine has spent in reductions (None: not measured), and in
            waiting for other ranks within reductions.
        mark: marks the end of a part; on a GPU a part ends after the kernels that it launched.

    Attributes:
        annotate: returns a context that shows a part as a named range in the trace of torch.profiler.
    """

    def __init__(
        self, engine_times: Callable[[], tuple[float | None, float]], mark: Callable[[], Any] = HostMark
    ) -> None:
        self._engine_times = engine_times
        self._mark = mark
        # Parts whose end time is not known yet: (part, first mark, last mark, seconds that belong to other parts).
        self._open: deque[tuple[str, Any, Any, float]] = deque()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.reduce_known = True
        self._part: str | None = None
        self._since: tuple[Any, float, float] = (None, 0.0, 0.0)  # beginning: mark, reduced, waited
        self.annotate: Callable[[str], AbstractContextManager[object]] = nullcontext
        self._range = ExitStack()  # the annotation of the current part

    def enter(self, part: str) -> None:
        now = self._now()
        self._close(now)
        self._part, self._since = part, now
        self._range.enter_context(self.annotate(part))

    def leave(self) -> None:
        """End the current part. The time until the next `enter` belongs to no part."""
        self._close(self._now())

    def _close(self, now: tuple[Any, float, float]) -> None:
        if self._part is None:
            return
        self._range.close()
        (mark, *times), (since, *times_before) = now, self._since
        reduced, waited = (after - before for after, before in zip(times, times_before, strict=True))
        self._seconds["reduce"] += reduced
        self._seconds["wait"] += waited
        self._open.append((self._part, since, mark, reduced + waited))
        self._part = None

    def ended(self, phase: str) -> None:
        """Enter the next part after `phase` ("forward" or "backward") of a micro-batch. Between steps, do nothing."""
        if self._part is not None:
            self.enter("backward" if phase == "forward" else "forward")

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part up to the last mark with a known time. Does not block."""
        while self._open and self._open[0][2].query():
            part, first, last, excluded_s = self._open.popleft()
            self._seconds[part] += first.elapsed_time(last) / 1e3 - excluded_s
        return dict(self._seconds)

    def synchronized_seconds(self) -> dict[str, float]:
        """Wait for the last mark and return `seconds`. Call this only where a step waits for the GPU anyway."""
        if self._open:
            self._open[-1][2].synchronize()
        return self.seconds()

    def _now(self) -> tuple[Any, float, float]:
        reduced, waited = self._engine_times()
        self.reduce_known = reduced is not None
        return self._mark(), reduced or 0.0, waited


class Profile:
    """Traces `steps` steps with torch.profiler on each rank, after two untraced steps, for `observe.profile`.

    RUN_DIR/profile/rank-N.json.gz opens in https://ui.perfetto.dev or chrome://tracing. rank-N.txt has tables of the
    parts of a step and of the operators. Call `step` before each step and `finish` after the last step.
    """

    def __init__(self, directory: Path, rank: int, steps: int, clock: StepClock) -> None:
        self._directory = directory
        self._rank = rank
        self._clock = clock
        self._steps = steps
        self._started_steps = 0
        self._profiler: torch.profiler.profile | None = None
        self._seconds_before: dict[str, float] = {}

    def step(self) -> None:
        """Start the trace before the first step to trace, and end the trace after the last one."""
        if not self._steps:
            return
        if self._started_steps == _SKIPPED_STEPS:
            self._start()
        elif self._started_steps == _SKIPPED_STEPS + self._steps:
            self.finish()
        self._started_steps += 1

    @property
    def missed(self) -> bool:
        """Whether the run ended before the steps to trace began."""
        return self._steps > 0 and self._started_steps <= _SKIPPED_STEPS

    def finish(self) -> None:
        """End the trace and write its files. After a StorageError, no partial file is left."""
        if self._profiler is None:
            return
        profiler, self._profiler, self._steps = self._profiler, None, 0
        self._clock.annotate = nullcontext
        profiler.stop()
        operators = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_MAX_OPERATORS)
        trace, table = (self._directory / f"rank-{self._rank}{suffix}" for suffix in (".json.gz", ".txt"))
        with writing(self._directory):
            self._directory.mkdir(exist_ok=True)
        try:
            with writing(trace):
                trace.unlink(missing_ok=True)  # the profiler would write through a symbolic link
                profiler.export_chrome_trace(str(trace))
            with writing(table):
                publish_text(table, f"{self._parts_table()}\n\noperators\n{operators}")
        except StorageError:
            for path in (trace, table):
                path.unlink(missing_ok=True)
            raise

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._seconds_before = self._clock.seconds()
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._clock.annotate = lambda part: record_function(f"aliquot: {part}")

    def _parts_table(self) -> str:
        steps = self._started_steps - _SKIPPED_STEPS
        after = self._clock.seconds()
        spent = {part: (after[part] - self._seconds_before[part]) / steps for part in PARTS}
        total = sum(spent.values()) or 1.0
        lines = [f"parts of a step, rank {self._rank}, mean of {steps} profiled steps (tracing slows them down)"]
        lines += [
            f"{part:12} {1e3 * seconds:10.2f} ms {100 * seconds / total:5.1f} %" for part, seconds in spent.items()
        ]
        return "\n".join([*lines, f"{'sum':12} {1e3 * total:10.2f} ms"])


class SlowRanks:
    """Finds ranks whose work per token takes longer than that of the median rank over the last `window_steps` steps."""

    def __init__(self, window_steps: int = 20) -> None:
        self.window_steps = window_steps
        self._window: deque[list[tuple[float, int]]] = deque(maxlen=window_steps)

    def add(self, own_work: Sequence[tuple[float, int]]) -> None:
        """Add a step: the seconds of work and the number of tokens of each rank."""
        self._window.append(list(own_work))

    def slowdowns(self) -> dict[int, float]:
        """Return the slow ranks with their time per token relative to the median; empty until the window is full.

        Ranks without tokens in the window do not count, because they only join collectives.
        """
        if len(self._window) < self.window_steps:
            return {}
        totals = [map(sum, zip(*steps, strict=True)) for steps in zip(*self._window, strict=True)]  # of each rank
        pace = {rank: seconds / tokens for rank, (seconds, tokens) in enumerate(totals) if tokens}
        median = statistics.median_low(pace.values()) if pace else 0.0
        return {rank: time / median for rank, time in pace.items() if median > 0 and time > _SLOW * median}
