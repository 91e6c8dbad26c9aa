"""What a run still has to do beside its steps: evaluations, saves, the export. Part of the time that is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.core.intervals import is_due, times_due, times_either_due


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
