"""What a run still has to do beside its steps: evaluations, saves, the export. Part of the time that is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aliquot.config.due import is_due, times_due
from aliquot.config.schema import RunConfig


class Remaining:
    """Seconds of each as it took last; before that as the plan foresaw it."""

    def __init__(self, config: RunConfig, total_steps: int, plan: Mapping[str, Any]) -> None:
        """`plan`: as `aliquot plan --json` prints it, or empty."""
        self._total = total_steps
        self._eval_steps, self._save_steps = config.train.eval_steps, config.checkpoint.every
        waits = not config.checkpoint.asynchronous
        self._saves_last = config.checkpoint.last or is_due(config.checkpoint.every, total_steps)
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
        """After `done` steps, before what is due then."""
        evaluations = _left(self._eval_steps, done, self._total)
        between = _left(self._save_steps, done, self._total, self._saves_last) - self._saves_last
        last_s = self._save_s if self._saves_last else 0.0
        return evaluations * self.evaluation_s + between * self.stall_s + last_s + self._export_s


def _left(every: int, done: int, total: int, last: bool = True) -> int:
    """How often something is due from step `done` to step `total`."""
    return times_due(every, total, last) - (max(0, done - 1) // every if every else 0)
