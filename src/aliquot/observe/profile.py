"""Trace steps with torch.profiler: `observe.profile: STEPS` traces that many steps of every rank after the first two.

RUN_DIR/profile/rank-N.json.gz opens in https://ui.perfetto.dev or chrome://tracing; rank-N.txt holds a table of the
parts of a step and one of the operators.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aliquot.core.errors import StorageError, writing
from aliquot.core.small_files import publish_text
from aliquot.observe.step_clock import PARTS, StepClock

if TYPE_CHECKING:
    import torch.profiler

_SKIPPED_STEPS = 2  # they compile and fault pages in
_MAX_OPERATORS = 40


class Profile:
    """Traces steps. Call `step` before each step and `finish` after the last one."""

    def __init__(self, directory: Path, rank: int, steps: int, clock: StepClock) -> None:
        """Prepare the trace.

        Args:
            directory: receives the trace and the table of this rank.
            steps: number of steps to trace; 0: none.
            clock: measures the parts of a step, and labels them in the trace.
        """
        self._directory = directory
        self._rank = rank
        self._clock = clock
        self._steps = steps
        self._started_steps = 0
        self._profiler: torch.profiler.profile | None = None
        self._seconds_before: dict[str, float] = {}

    def step(self) -> None:
        """Start or end the trace if the next step requires it."""
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
        """Write the trace. Raises StorageError, and then leaves no partial file."""
        if self._profiler is None:
            return
        profiler, self._profiler, self._steps = self._profiler, None, 0
        self._clock.annotate = None
        profiler.stop()
        operators = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_MAX_OPERATORS)
        trace, table = (self._directory / f"rank-{self._rank}{suffix}" for suffix in (".json.gz", ".txt"))
        with writing(self._directory):
            self._directory.mkdir(exist_ok=True)
        try:
            with writing(trace):
                trace.unlink(missing_ok=True)  # a link would be followed
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
