"""The current activity of a rank, as errors and watchdogs name it: `... while planning`."""

from __future__ import annotations

from collections.abc import Callable

from aliquot.distributed.liveness.watchdog import Watchdog

_REST_S = 30.0


class Activity:
    """The current stage of this rank, which heartbeat and watchdogs report when a node is lost or the run hangs."""

    def __init__(self) -> None:
        self.stage = "beginning"

    def enter(self, stage: str, saving: int | None = None) -> None:
        """Enter a stage, for example "planning". `saving`: the step whose checkpoint is being written."""
        self.stage = stage if saving is None else f"{stage}, and saving step {saving}"


class PhaseNotice(Watchdog):
    """A context manager that shows a stage that has lasted for 30 seconds, once: silence would look like a hang."""

    def __init__(self, activity: Activity, show: Callable[[str], None]) -> None:
        super().__init__(_REST_S)
        self._activity, self._show = activity, show
        self._before = self._shown = ""

    def check(self) -> None:
        stage = self._activity.stage
        if stage == self._before != self._shown:
            self._show(f"still {stage}")
            self._shown = stage
        self._before = stage
