"""What is recorded of the training loop: its pace, its parts, its curve, what happened, and the report at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from types import TracebackType
from typing import Any, Self

from aliquot.config.schema import RunConfig
from aliquot.core.errors import StorageError, UserError
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.signals import Terminated
from aliquot.machine.gpu_memory import Gpu
from aliquot.machine.memory import PssSampler
from aliquot.observe.console import Display
from aliquot.observe.events import Events, command_line
from aliquot.observe.kubeflow import kubeflow_status
from aliquot.observe.metrics import Curve
from aliquot.observe.profile import Profile
from aliquot.observe.prometheus import Exporter
from aliquot.observe.report.page import write_report
from aliquot.observe.run_directory import RunDirectory
from aliquot.observe.run_record import RunRecord
from aliquot.observe.step_clock import OWN_WORK, PARTS, SlowRanks, StepClock
from aliquot.observe.throughput import Meter, Remaining

_LATER_S = 30.0  # after which a machine that had other work may have none
_MOST_MEASUREMENTS = 3  # of the matmul ceiling during an attempt, each of about a second


class Recorder:
    """A context around the steps of a run; every rank has one, and what is written is written by rank 0.

    In each step, in this order: `begin`, `enter` of parts as they come with one `gather` among them, `end`; then, where
    `due`, `log`. `gather` and `log` are collective.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        ranks: Ranks,
        display: Display,
        clock: StepClock,
        exporter: Exporter,
        record: RunRecord,
        measure_ceiling: Callable[[], float],
        gpu: Gpu | None,
        steps_before: int,
        total_steps: int,
    ) -> None:
        """`measure_ceiling`: collective; `steps_before`: those of the runs
        that this one continues."""
        self.meter = Meter(record.ceiling_flops_per_s)
        self._config = config
        self._directory = directory
        self._ranks = ranks
        self._display = display
        self._clock = clock
        self._exporter = exporter
        self._record = record
        self._before, self._done, self._total = steps_before, steps_before, total_steps
        self._events = Events(directory.events, ranks.rank == 0)
        self._profile = Profile(directory.profile, ranks.rank, config.observe.profile, clock)
        self._pss = PssSampler()
        self._slow = SlowRanks()
        self._slow_ranks: Mapping[int, float] = {}
        self._logged = (steps_before, clock.seconds())  # the last step that was logged, and the seconds until then
        self._step_began = clock.seconds()
        self._said_full = False
        self._measure_ceiling = measure_ceiling
        self._ceiling_is_sure = record.ceiling_is_sure
        self._began_at = time.monotonic()
        self._gpu = gpu
        self._measurements_left = _MOST_MEASUREMENTS
        self._remaining = Remaining(config, total_steps, record.plan)
        self._evaluation_began = 0.0

    def __enter__(self) -> Self:
        directory, first = self._directory, self._ranks.rank == 0
        self._status = status = kubeflow_status(self._total) if first else None
        self._curve = Curve(
            directory.metrics, directory.tensorboard, self._config.observe, self._before, first, self._exporter, status,
            self._display.warning,
        )  # fmt: skip
        machine = self._record.machine
        # By the plan it is less where launcher and dashboards, or shard.memory, leave less.
        limit = machine["memory_limit_bytes"] // self._ranks.topology.local_world_size
        if self._gpu is None:
            limit = self._record.plan.get("limit_bytes", limit)
        self._display.training(limit, None if self._gpu is None else machine["gpu_memory_bytes"])
        kind = "start" if self._record.resumed_from is None else "resume"
        facts = {**self._record.as_json(), "world_size": self._ranks.world_size, "nodes": self._ranks.topology.nodes}
        started = {"aliquot": version("aliquot"), "command": command_line(), "total_steps": self._total}
        self._events.write(kind, self._before, **facts, **started)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        troubles = []  # on a full disk: all is tried, and nothing hides what ended the run
        for last in (partial(self._ended, error), self._curve.close):  # dashboards look up how it ended
            try:
                last()
            except StorageError as trouble:
                troubles.append(trouble)
        self._events.close()
        if self._ranks.rank == 0 and self._directory.why_lost() is None:
            self._write_report()
        if troubles and error is None:
            self._storage_failed(troubles[0])

    def _ended(self, error: BaseException | None) -> None:
        """The last event."""
        speed = asdict(self.meter.overall()) if self._done > self._before else {}
        if error is None:
            self._events.write("end", self._done, **speed)
        elif isinstance(error, Terminated):
            self._events.write("stopped", self._done, text=str(error), **speed)
        else:
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._events.write("failed", self._done, text=text, **speed)

    def begin(self) -> None:
        with self._profile_unless_full():
            self._profile.step()
        self.meter.begin()
        self._step_began = self._clock.seconds()
        self._clock.enter("data")

    def enter(self, part: str) -> None:
        self._clock.enter(part)

    @contextmanager
    def between_steps(self, part: str) -> Iterator[None]:
        self._clock.enter(part)
        yield
        self._clock.leave()

    def gather(self, report: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
        """The reports of all ranks, and how long each has worked for its `tokens` (padding too) in this step."""
        self._clock.enter("wait")
        now = self._clock.waited()
        worked_s = sum(now[part] - self._step_began[part] for part in OWN_WORK)
        reports = self._ranks.gather({**report, "worked": [worked_s, tokens]})
        if self._done > self._before:  # the first step compiles and faults pages in, on some ranks more than on others
            self._slow.add([told["worked"] for told in reports])
        return reports

    def end(self, tokens: int, flops: int, saving: int | None) -> None:
        """A step is done, over `tokens` real tokens; `saving`: the step whose checkpoint is under way."""
        self._clock.leave()
        saving_s = self._clock.seconds()["checkpoint"] - self._step_began["checkpoint"]
        self.meter.end(tokens, flops, saving_s)
        self._done += 1
        found = self._slow.found()
        if found.keys() - self._slow_ranks.keys():
            names = ", ".join(f"rank {rank} ({ratio:.1f} x the median)" for rank, ratio in found.items())
            self.warn(f"slow for {self._slow.window_steps} steps, the others wait: {names}", "slow_ranks")
        self._slow_ranks = found
        self._display.tick(self._done, self._total, self._eta_s(), saving, list(found))

    def due(self, step: int) -> bool:
        return step % self._config.train.logging_steps == 0 or step in (self._before + 1, self._total)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """`metrics` of the step that ended, to which pace, parts and memory are added. Collective."""
        step, before = self._logged
        now = self._clock.seconds()
        self._logged = (self._done, now)
        steps = self._done - step
        own = {part: (now[part] - before[part]) / steps for part in PARTS}
        # The machine had other work when it was measured, and perhaps has none any more.
        in_doubt = not self._ceiling_is_sure and time.monotonic() - self._began_at > _LATER_S
        beaten = self.meter.beats_ceiling or in_doubt
        of_gpu = None if self._gpu is None else self._gpu.memory().used_bytes
        told = self._ranks.gather({"parts": own, "memory": self._pss.bytes(), "gpu_memory": of_gpu, "beaten": beaten})
        if told[0]["beaten"] and self._measurements_left:
            self._measurements_left -= 1
            self._ceiling_is_sure = True
            self.meter.raise_ceiling(self._measure_ceiling())
        parts: dict[str, float | None] = {
            f"{part}_s": sum(rank["parts"][part] for rank in told) / len(told) for part in PARTS
        }
        if not self._clock.reduce_known:
            parts["reduce_s"] = None
        line = {
            "step": self._done,
            "engine": self._record.engine,
            **metrics,
            **self.meter.readings(),
            "eta_s": self._eta_s(),
            **parts,
            "own_work_s": [sum(rank["parts"][part] for part in OWN_WORK) for rank in told],
            "memory_bytes": [rank["memory"] for rank in told],
        }
        if self._gpu is not None:
            line["gpu_memory_bytes"] = [rank["gpu_memory"] for rank in told]
        with self._unless_full():
            self._curve.write(line)
        self._display.step(line, self._total)

    def _eta_s(self) -> float | None:
        left = self._total - self._done
        steps_s = self.meter.steps_s(left)
        if steps_s is None:
            return None
        if self._done == self._before + 1 and (planned := self._record.plan.get("step_s")):
            steps_s = min(steps_s, left * planned)  # the first one compiles, and has its memory mapped
        return steps_s + self._remaining.seconds(self._done)

    def evaluating(self, done: int, of: int) -> None:
        """So many micro-batches of an evaluation are done."""
        if done == 0:
            self._evaluation_began = time.perf_counter()
        self._display.evaluating(done, of, time.perf_counter() - self._evaluation_began)

    def evaluated(self, found: Mapping[str, tuple[float, float, float | None]]) -> float:
        """Record an evaluation after the steps done so far: loss, perplexity and bits per byte of each set by its name.

        Returns the perplexity of the set that has no name, else of the first.
        """
        self._remaining.evaluation_s = time.perf_counter() - self._evaluation_began
        line: dict[str, Any] = {"step": self._done}
        for name, (loss, perplexity, bits_per_byte) in found.items():
            own = {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte}
            prefix = f"eval_{name}_" if name else "eval_"
            line.update({f"{prefix}{key}": value for key, value in own.items() if value is not None})
        with self._unless_full():
            self._curve.write(line)
        for name, (loss, perplexity, bits_per_byte) in found.items():
            told = f"evaluation {f'{name}: ' if name else ''}loss {loss:.4f}, perplexity {perplexity:.2f}"
            told += f", {bits_per_byte:.3f} bits per byte" if bits_per_byte is not None else ""
            self._display.line(f"step {self._done}: {told}")
        return found.get("", next(iter(found.values())))[1]

    def saved(self, step: int, seconds: float, stall_s: float) -> None:
        """A checkpoint is complete, after so many seconds, of which training stood still for `stall_s`."""
        with self._unless_full():
            self._events.write("checkpoint", step, seconds=seconds, stall_s=stall_s)
        self._remaining.saved(seconds, stall_s)
        self._display.saved(step, seconds, stall_s)

    def stopped_early(self, text: str) -> None:
        """The step that was done is the last one."""
        self._total = self._done
        if self._status is not None:
            self._status.ends_at(self._done)
        self._display.line(f"stopped early after step {self._done}: {text}")
        with self._unless_full():
            self._events.write("stopped_early", self._done, text=text)

    def warn(self, text: str, event: str = "warning") -> None:
        self._display.warning(text)
        with self._unless_full():
            self._events.write(event, self._done, text=text)

    def finish(self) -> None:
        """All steps are done."""
        with self._profile_unless_full():
            self._profile.finish()
        if self._profile.missed:
            self.warn("observe.profile: the run ended before the steps to trace began; tracing begins with the third")

    @contextmanager
    def _unless_full(self) -> Iterator[None]:
        """On a full disk, leave out what is written within or end the run, as checkpoint.on_error says."""
        try:
            yield
        except StorageError as error:
            self._storage_failed(error)

    @contextmanager
    def _profile_unless_full(self) -> Iterator[None]:
        """As `_unless_full`, on each rank: every one writes its own trace."""
        try:
            yield
        except StorageError as error:
            if self._config.checkpoint.on_error == "stop":
                raise
            self._display.warning(f"observe.profile: {error}")

    def _storage_failed(self, error: StorageError) -> None:
        if self._config.checkpoint.on_error == "stop":
            raise error
        if not self._said_full:
            self._said_full = True
            self._display.warning(f"metrics and events are not recorded as long as this lasts: {error}")

    def _write_report(self) -> None:
        try:
            write_report([self._directory.path], self._directory.report)
        # Whatever is wrong with a page must not be what ends a run that is done, nor hide what ended one.
        except Exception as error:
            self._display.warning(f"no report: {type(error).__name__}: {error}; `aliquot report --debug` tells more")
