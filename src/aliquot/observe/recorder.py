"""Record the training loop: throughput, time by part of a step, metrics, events, and the report at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from types import TracebackType
from typing import Any, Self

from aliquot.config.schema import RunConfig
from aliquot.core import number_format
from aliquot.core.errors import StorageError, UserError
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.signals import Terminated
from aliquot.machine.memory import Gpu, PssSampler
from aliquot.observe.console import Display
from aliquot.observe.dashboards import KubeflowStatus, kubeflow_status
from aliquot.observe.events import Events, RunRecord, command_line
from aliquot.observe.metrics import Exporter, Writer, writers
from aliquot.observe.report.page import write_report
from aliquot.observe.run_directory import RunDirectory
from aliquot.observe.step_clock import OWN_WORK, PARTS, Profile, SlowRanks, StepClock
from aliquot.observe.throughput import Meter, RemainingWork

_REMEASURE_AFTER_S = 30.0  # other work on the machine may have ended by then
_EVALUATED = {  # metric of an evaluation -> text on the console
    "loss": "loss {:.4f}",
    "perplexity": "perplexity {:.2f}",
    "bits_per_byte": "{:.3f} bits per byte",
    "rewards/accuracies": "accuracy {:.3f}",
    "rewards/margins": "margin {:.4f}",
}
_WATCHED_STEPS = 5  # steps after which the pace is compared with the plan
_FAR_BEHIND = 5  # a step that takes more than this many times as long as planned is a warning
_LONG_STEP_S = 1.0  # of shorter steps, calls and file systems take a part that no plan knows
_MAX_MEASUREMENTS = 3  # of the compute ceiling per attempt; each takes about a second


@dataclass(frozen=True)
class RecordedRun:
    """The attempt that a recorder records: one start or resume of a run."""

    config: RunConfig
    directory: RunDirectory
    ranks: Ranks
    display: Display
    exporter: Exporter
    record: RunRecord
    gpu: Gpu | None


class Recorder:
    """A context manager around the steps of a run, on every rank. Only rank 0 writes to the run directory.

    In each step, call `begin`, then `enter` for each part of the step with one `gather` in between, then `end`. Call
    `log` if the step `is_due`. `gather` and `log` are collective.
    """

    def __init__(
        self,
        run: RecordedRun,
        clock: StepClock,
        measure_ceiling: Callable[[], float],
        steps_before: int,
        total_steps: int,
    ) -> None:
        """Record steps `steps_before` + 1 to `total_steps`. `measure_ceiling` is collective and returns FLOP/s."""
        self._run, self._display, self._ranks = run, run.display, run.ranks
        self._clock = clock
        self._measure_ceiling = measure_ceiling
        self._before, self._done, self._total = steps_before, steps_before, total_steps
        self.meter = Meter(run.record.ceiling_flops_per_s)
        self._events = Events(run.directory.events, run.ranks.rank == 0)
        self._profile = Profile(run.directory.profile, run.ranks.rank, run.config.observe.profile, clock)
        self._pss = PssSampler()
        self._slow = SlowRanks()
        self._reported_slow: set[int] = set()
        self._logged = (steps_before, clock.seconds())  # the last logged step, and the seconds of parts until then
        self._seconds_at_begin = clock.seconds()
        self._losses: set[str] = set()  # what a full disk has prevented
        self._writers: list[Writer] = []  # on rank 0
        self._status: KubeflowStatus | None = None
        self._ceiling_is_sure = run.record.ceiling_is_sure
        self._measurements_left = _MAX_MEASUREMENTS
        self._started_at = time.monotonic()
        self._remaining = RemainingWork(run.config, total_steps, run.record.plan)
        self._evaluation_start = 0.0
        self._evaluation: str | None = None  # the newest evaluation of this attempt, of the first set

    def __enter__(self) -> Self:
        run, topology, record = self._run, self._ranks.topology, self._run.record
        if self._ranks.rank == 0:
            self._status = kubeflow_status(self._total)
            report_to, warn = run.config.observe.report_to, self._display.warning
            self._writers = [*writers(run.directory, self._before, report_to, warn), run.exporter]
            self._writers += [self._status] if self._status else []
        # The plan's limit excludes the memory of launcher and dashboards and respects shard.memory.
        limit = record.machine["memory_limit_bytes"] // topology.local_world_size
        if run.gpu is None:
            limit = record.plan.get("limit_bytes", limit)
        self._display.start_training(limit, None if run.gpu is None else record.machine["gpu_memory_bytes"])
        kind = "start" if record.resumed_from is None else "resume"
        self._events.write(
            kind, self._before, **record.as_json(), world_size=self._ranks.world_size, nodes=topology.nodes,
            aliquot=version("aliquot"), command=command_line(), total_steps=self._total, data=record.data,
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # A full disk does not hide the error that ended the run.
            with self._tolerating_full_disk() if error is None else suppress(StorageError), ExitStack() as stack:
                for writer in self._writers:
                    stack.callback(writer.close)
                stack.callback(self._write_end, error)  # called first, because dashboards read the last event
        finally:
            self._events.close()
            if self._ranks.rank == 0 and self._run.directory.lock.why_lost() is None:
                self._write_report()

    def _write_end(self, error: BaseException | None) -> None:
        """Write the final event: end, stopped or failed."""
        kind = "end" if error is None else "stopped" if isinstance(error, Terminated) else "failed"
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        speed = asdict(self.meter.overall()) if self._done > self._before else {}
        self._events.write(kind, self._done, **({} if error is None else {"text": text}), **speed)

    def begin(self) -> None:
        with self._tolerating_full_disk("observe.profile"):
            self._profile.step()
        self.meter.begin()
        self._seconds_at_begin = self._clock.seconds()
        self._clock.enter("data")

    def enter(self, part: str) -> None:
        self._clock.enter(part)

    @contextmanager
    def between_steps(self, part: str) -> Iterator[None]:
        self._clock.enter(part)
        yield
        self._clock.leave()

    def gather(self, report: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
        """Gather the reports of all ranks, and the time that each rank worked on its `tokens`, including padding."""
        self._clock.enter("wait")
        now = self._clock.synchronized_seconds()
        worked_s = sum(now[part] - self._seconds_at_begin[part] for part in OWN_WORK)
        reports = self._ranks.gather({**report, "worked": [worked_s, tokens]})
        if self._done > self._before:  # in the first step, compilation and page faults make ranks differ
            self._slow.add([report["worked"] for report in reports])
        return reports

    def end(self, tokens: int, flops: int, saving: int | None) -> None:
        """Record the end of a step.

        Args:
            tokens: real tokens of all ranks, without padding.
            saving: step whose checkpoint is being written.
        """
        self._clock.leave()
        self.meter.end(tokens, flops, self._clock.seconds()["checkpoint"] - self._seconds_at_begin["checkpoint"])
        self._done += 1
        slow = self._slow.slowdowns()
        if slow.keys() - self._reported_slow:  # once a rank, because windows overlap
            names = ", ".join(f"rank {rank} ({ratio:.1f} x the median)" for rank, ratio in slow.items())
            self.warn(f"slow for {self._slow.window_steps} steps, the others wait: {names}", "slow_ranks")
        self._reported_slow |= slow.keys()
        self._display.tick(self._done, self._total, self._eta_s(), saving, list(slow))

    def compare_with_plan(self) -> None:
        """Warn once, after a few steps on CPUs, if a step takes much longer than planned."""
        step_s, planned_s = self.meter.steps_s(1), self._run.record.plan.get("step_s")
        is_watched = self._done - self._before == _WATCHED_STEPS and self._run.gpu is None
        if is_watched and step_s and planned_s and step_s > max(_FAR_BEHIND * planned_s, _LONG_STEP_S):
            self.warn(
                f"a step takes {number_format.seconds(step_s)}, by the plan {number_format.seconds(planned_s)}: look"
                f" for other processes on these cores (top; the load is {os.getloadavg()[0]:.0f}), and for a CPU"
                " quota (aliquot doctor)"
            )

    def is_due(self, step: int) -> bool:
        return step % self._run.config.train.logging_steps == 0 or step in (self._before + 1, self._total)

    def log(self, metrics: Mapping[str, Any], caller: Mapping[str, float]) -> Mapping[str, Any]:
        """Log `metrics` of the last step with speed, time by part and memory; return all of them. Collective.

        `caller`: values that the caller's loop has logged.
        """
        step, before = self._logged
        now = self._clock.seconds()
        self._logged = (self._done, now)
        steps = self._done - step
        seconds = {part: (now[part] - before[part]) / steps for part in PARTS}
        # Measure the ceiling again if other work disturbed the first measurement, because that work may have ended. The
        # memory of a GPU, which a measurement needs, is full by now.
        is_doubtful = not self._ceiling_is_sure and time.monotonic() - self._started_at > _REMEASURE_AFTER_S
        reports = self._ranks.gather(
            {
                "parts": seconds,
                "memory": self._pss.bytes(),
                "gpu_memory": None if self._run.gpu is None else self._run.gpu.memory().used_bytes,
                "measure": self._run.gpu is None and (self.meter.beats_ceiling or is_doubtful),
            }
        )
        if reports[0]["measure"] and self._measurements_left:
            self._measurements_left -= 1
            self._ceiling_is_sure = True
            self.meter.raise_ceiling(self._measure_ceiling())
        parts = {f"{part}_s": sum(rank["parts"][part] for rank in reports) / len(reports) for part in PARTS}
        line = {
            "step": self._done,
            "engine": self._run.record.engine,
            **metrics,
            **caller,
            **self.meter.readings(),
            "eta_s": self._eta_s(),
            **parts,
            **({} if self._clock.reduce_known else {"reduce_s": None}),
            "own_work_s": [sum(rank["parts"][part] for part in OWN_WORK) for rank in reports],
            "memory_bytes": [rank["memory"] for rank in reports],
            **({} if self._run.gpu is None else {"gpu_memory_bytes": [rank["gpu_memory"] for rank in reports]}),
        }
        self._write_metrics(line)
        self._display.step({**line, "evaluation": self._evaluation, "caller": caller}, self._total)  # for the live view
        return line

    def _eta_s(self) -> float | None:
        left = self._total - self._done
        steps_s = self.meter.steps_s(left)
        if steps_s is None:
            return None
        # The first step compiles and faults pages in, so its duration does not predict later steps.
        if self._done == self._before + 1 and (planned := self._run.record.plan.get("step_s")):
            steps_s = min(steps_s, left * planned)
        return steps_s + self._remaining.seconds(self._done)

    def evaluating(self, done: int, total: int) -> None:
        """Record that `done` of `total` micro-batches of an evaluation are done."""
        if done == 0:
            self._evaluation_start = time.perf_counter()
        self._display.evaluating(done, total, time.perf_counter() - self._evaluation_start)

    def evaluated(self, results: Mapping[str, Mapping[str, float]]) -> Mapping[str, Any]:
        """Record an evaluation: its metrics by name of the evaluation set.

        Return the metrics, as in metrics.jsonl.
        """
        self._remaining.evaluation_s = time.perf_counter() - self._evaluation_start
        line: dict[str, Any] = {"step": self._done}
        texts = []
        for name, metrics in results.items():
            prefix = f"eval_{name}_" if name else "eval_"
            line |= {f"{prefix}{metric}": value for metric, value in metrics.items()}
            shown = [text.format(metrics[metric]) for metric, text in _EVALUATED.items() if metric in metrics]
            texts.append(f"evaluation {f'{name}: ' if name else ''}{', '.join(shown)}")
        self._write_metrics(line)
        for text in texts:
            self._display.line(f"step {self._done}: {text}")
        self._evaluation = texts[0]
        return line

    def saved(self, step: int, seconds: float, stall_s: float) -> None:
        """Record a save that took `seconds`. Training waited for `stall_s` of them."""
        with self._tolerating_full_disk():
            self._events.write("checkpoint", step, seconds=seconds, stall_s=stall_s)
        self._remaining.saved(seconds, stall_s)
        self._display.saved(step, seconds, stall_s)

    def stopped_early(self, text: str) -> None:
        """Record that the run ends early, after the last step."""
        self._total = self._done
        if self._status is not None:
            self._status.total_steps = self._done
        self._display.line(f"stopped early after step {self._done}: {text}")
        with self._tolerating_full_disk():
            self._events.write("stopped_early", self._done, text=text)

    def warn(self, text: str, event: str = "warning") -> None:
        self._display.warning(text)
        with self._tolerating_full_disk():
            self._events.write(event, self._done, text=text)

    def finish(self) -> None:
        """Write the profile after the last step."""
        with self._tolerating_full_disk("observe.profile"):
            self._profile.finish()
        if self._profile.missed:
            self.warn("observe.profile: the run ended before the steps to trace began; tracing begins with the third")

    @contextmanager
    def _tolerating_full_disk(
        self, loss: str = "metrics and events are not recorded until this error ends"
    ) -> Iterator[None]:
        """If the disk is full, warn once of the `loss` or end the run, as `checkpoint.on_error` says."""
        try:
            yield
        except StorageError as error:
            if self._run.config.checkpoint.on_error == "stop":
                raise
            if loss not in self._losses:
                self._losses.add(loss)
                self._display.warning(f"{loss}: {error}")

    def _write_metrics(self, line: Mapping[str, Any]) -> None:
        # Every writer gets the line, even after an error of another one.
        with self._tolerating_full_disk(), ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.write, line)

    def _write_report(self) -> None:
        try:
            write_report([self._run.directory.path], self._run.directory.report)
        # An error in the report must neither end a complete run nor hide the error that ended the run.
        except Exception as error:
            self._display.warning(
                f"no report: {type(error).__name__}: {error}; `aliquot report --debug` shows the traceback"
            )
