"""Read the directory of a complete, running or killed run for the report.

The files are not trusted. Truncated lines are skipped, and implausible numbers count as missing.
"""

from __future__ import annotations

import fcntl
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from aliquot.checkpoint.directories import directories, step_of
from aliquot.core.decode import decode_json, load_yaml, read_json_lines
from aliquot.core.errors import RunDirectoryError
from aliquot.core.run_lock import LOCK
from aliquot.core.small_files import RUN_FILE_BYTES, open_regular, read_small_file
from aliquot.observe.events import ENDS
from aliquot.observe.ledger import PHASES
from aliquot.observe.run_directory import HEADER, RunDirectory
from aliquot.observe.step_clock import PARTS

BEGINS = ("start", "resume")  # the first event of an attempt
_MAX_NUMBER = 1e24

T = TypeVar("T")
Object = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Status:
    """The state of a run. `word`: complete, running, stopped, failed, killed or empty; `detail`: the reason."""

    word: str
    detail: str


@dataclass(frozen=True)
class Run:
    """The recorded facts of a run."""

    path: Path
    name: str
    config: Object
    config_text: str | None
    steps: list[Object]  # logged steps, by step
    lines: list[Object]  # of metrics.jsonl: logged steps and evaluations
    events: list[Object]
    rows: list[Object]  # of the memory ledger
    plan: Object  # in the form of `aliquot plan --json`; empty if no plan was recorded
    machine: Object
    checkpoints: dict[int, int]  # step -> size in bytes of existing checkpoints
    doctor: Any  # content of doctor.json; None if the file is missing
    status: Status

    @property
    def attempts(self) -> list[Object]:
        """The events at each start and resume."""
        return [event for event in self.events if event.get("event") in BEGINS]

    @property
    def beginnings(self) -> list[float]:
        """The step before the first step of each attempt that contributes to the metrics.

        An attempt that resumed from an earlier step replaces the metrics of previous attempts after this step.
        """
        steps = [step for attempt in reversed(self.attempts) if (step := number(attempt.get("step"))) is not None]
        return sorted(set(accumulate(steps, min)))

    @property
    def about(self) -> Object:
        """The first event of the newest attempt: its model, machine and world size."""
        return self.attempts[-1] if self.attempts else {}

    def training_s(self, now: float | None = None) -> float:
        """Return the seconds of all attempts, each from its start to its last event, or until `now`, without pauses."""
        times = [(event, at) for event in self.events if (at := number(event.get("time"))) is not None]
        times += [({}, now)] if now is not None else []
        gaps = ((event.get("event"), later - at) for (_, at), (event, later) in pairwise(times))
        return sum(max(0.0, gap) for kind, gap in gaps if kind not in BEGINS)  # clocks may be set back

    def points(self, key: str, lines: list[Object] | None = None, x: str = "step") -> Points:
        """Return the points (`x`, `key`) of the logged steps, or of `lines`, that have numbers for both."""
        pairs = [(number(line.get(x)), number(line.get(key))) for line in (self.steps if lines is None else lines)]
        return [(at, value) for at, value in pairs if at is not None and value is not None]

    @property
    def evaluation_sets(self) -> list[str]:
        """The names of the evaluation sets in the order of the lines, "" for the set without a name."""
        keys = [key for line in self.lines for key in line if key.startswith("eval_") and key.endswith("loss")]
        return list(dict.fromkeys(key.removeprefix("eval_").removesuffix("loss").removesuffix("_") for key in keys))

    @property
    def main_set(self) -> str:
        """The evaluation set without a name, or else the first one."""
        return "" if "" in self.evaluation_sets else next(iter(self.evaluation_sets), "")

    def evaluated(self, metric: str, name: str | None = None) -> Points:
        """Return the points of `metric` of the evaluation set `name`, or of the main set."""
        name = self.main_set if name is None else name
        return self.points(f"eval_{name}_{metric}" if name else f"eval_{metric}", self.lines)

    def number_lists(self, key: str) -> list[tuple[float, list[float]]]:
        """Return the step and the numbers of each logged step whose list `key`, of ranks or layers, has numbers."""
        lists = []
        for line in self.steps:
            step, values = number(line.get("step")), line.get(key)
            numbers = list(map(number, values)) if isinstance(values, list) else []
            if step is not None and (known := [value for value in numbers if value is not None]):
                lists.append((step, known))
        return lists

    def setting(self, section: str, key: str) -> Any:
        return as_object(self.config.get(section)).get(key)

    @property
    def first_steps(self) -> set[float]:
        """The first step of each attempt, which compiles and faults pages in."""
        return {step + 1 for step in self.beginnings}

    def steady(self, key: str) -> Points:
        """Return the points of `key` without the first step of each attempt, unless there are no others."""
        points = self.points(key)
        return [point for point in points if point[0] not in self.first_steps] or points

    def average(self, key: str) -> tuple[float, str] | None:
        """Return the mean of `tokens_per_s` or `mfu` and its source: the final event, or the median of logged steps."""
        last = self.events[-1] if self.events else {}
        overall = number(last.get(key)) if last.get("event") in ENDS else None
        if overall is not None:
            return overall, "over all steps since the last start but the first"
        logged = self.steady(key)
        return (median(logged), "median of the logged steps") if logged else None

    def timed(self) -> list[Object]:
        """Return the logged steps with times of parts, without the first step of each attempt if there are others."""
        lines = [line for line in self.steps if number(line.get("forward_s")) is not None]
        return [line for line in lines if number(line.get("step")) not in self.first_steps] or lines

    def mean_parts(self) -> dict[str, float]:
        """Return the mean seconds of each part over the steps of `timed`; 0 if there are none."""
        steps = [number(line.get("step")) or 0.0 for line in self.steps]
        # A line stands for all steps since the previous line.
        gaps = [max(1.0, step - before) for before, step in pairwise([0.0, *steps])]
        timed = {id(line) for line in self.timed()}
        weights = [(gap, line) for gap, line in zip(gaps, self.steps, strict=True) if id(line) in timed]
        total = sum(weight for weight, _ in weights) or 1.0
        return {
            part: sum(weight * (number(line.get(f"{part}_s")) or 0.0) for weight, line in weights) / total
            for part in PARTS
        }

    def slowest(self) -> tuple[float, float]:
        """Return the seconds and the number of the slowest step of `timed`. A line has the mean of its steps."""
        return max(
            (sum(number(line.get(f"{part}_s")) or 0.0 for part in PARTS), number(line.get("step")) or 0.0)
            for line in self.timed()
        )

    def per_step(self, key: str) -> Points:
        """Return the increase per step of a counter that starts at zero in each attempt."""
        return [
            (step, (high - low) / (step - before))
            for (before, low), (step, high) in pairwise(self.points(key))
            if step > before and high >= low and step not in self.first_steps
        ]

    @property
    def ceiling(self) -> float | None:
        """The newest compute ceiling of all ranks together, in FLOP/s."""
        for line in reversed(self.steps):
            flops, mfu = number(line.get("flops_per_s")), number(line.get("mfu"))
            if flops and mfu:
                return flops / mfu
        return number(self.about.get("ceiling_flops_per_s")) or None


def read_run(path: Path) -> Run:
    """Read a run. Raises UserError if `path` is not a run directory."""
    directory = RunDirectory(path)
    text = _text(path / "config.yaml")
    if text is None and (messages := [error["message"] for error in _rank_errors(path) if "message" in error]):
        raise RunDirectoryError(f"this run ended before it began: {messages[0]}", path)
    if text is None or not text.startswith(HEADER):
        raise RunDirectoryError("this is not a run directory: a run has a config.yaml that aliquot wrote", path)
    config = as_object(_if_readable(lambda: load_yaml(text)[0], None))
    lines, events, ledger = _lines(directory.metrics), _lines(directory.events), as_object(_json(directory.ledger))
    steps = [line for line in lines if "loss" in line]
    return Run(
        path=path,
        name=str(as_object(config.get("run")).get("name") or path.name),
        config=config,
        config_text=text,
        steps=steps,
        lines=lines,
        events=events,
        rows=[row for row in objects(ledger.get("rows")) if row.get("phase") in PHASES],
        # Before the first step, only the start event has the plan.
        plan=next((plan for plan in (ledger.get("plan"), *_newest(events, "plan")) if isinstance(plan, dict)), {}),
        machine=as_object(next(_newest(events, "machine"), ledger.get("machine"))),
        checkpoints=_checkpoints(directory.checkpoints),
        doctor=_json(path / "doctor.json"),
        status=_status(path, events, steps),
    )


def _newest(events: list[Object], key: str) -> Iterator[Object]:
    return (event[key] for event in reversed(events) if isinstance(event.get(key), dict))


def as_object(value: Any) -> Object:
    """Return a JSON object; empty if `value` is anything else."""
    return value if isinstance(value, dict) else {}


def objects(value: Any) -> list[Object]:
    """Return the objects in a JSON array; none if `value` is anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """Return `value` if it is a plausible number, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_NUMBER:
        return None
    return float(value)


def first(points: Points) -> float:
    """Return the value of the first point, or 0."""
    return points[0][1] if points else 0.0


def last(points: Points) -> float:
    """Return the value of the last point, or 0."""
    return points[-1][1] if points else 0.0


def median(points: Points) -> float:
    """Return the value in the middle, the higher of two, or 0."""
    return statistics.median_high([value for _, value in points] or [0.0])


def _status(path: Path, events: list[Object], steps: list[Object]) -> Status:
    last = next((event for event in reversed(events) if event.get("event") in (*ENDS, *BEGINS)), None)
    if last is not None and last["event"] == "end":
        early = any(event.get("event") == "stopped_early" for event in events)
        return Status("complete", "it stopped early" if early else "all steps are done")
    if last is not None and last["event"] in ENDS:
        default_text = {"stopped": "told to stop by SIGTERM", "failed": "it ended with an error"}
        return Status(last["event"], str(last.get("text", "")) or default_text[last["event"]])
    if _is_locked(path / LOCK):
        return Status("running", "a process is training into this directory now")
    if last is None and not steps:
        return Status("empty", "no step has been logged")
    if causes := [error for error in _rank_errors(path) if error.get("kind") != "peer_lost"]:
        return Status("failed", f"rank {causes[0].get('rank')}: {causes[0].get('message')}")
    return Status("killed", "it ended without a final event: it was killed, ran out of memory, or its machine was lost")


def _rank_errors(path: Path) -> list[Object]:
    return objects([_json(file) for file in sorted((path / "logs").glob("rank-*.error.json"))])


def _is_locked(lock: Path) -> bool:
    """Return whether a process holds the run's lock."""
    try:
        with open_regular(lock, "none") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases the lock at once
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _checkpoints(directory: Path) -> dict[int, int]:
    sizes = {}
    for path in _if_readable(lambda: directories(directory), list[Path]()):
        with suppress(OSError):  # retention has just removed the checkpoint
            sizes[step_of(path)] = sum(file.stat().st_size for file in path.iterdir())
    return sizes


def _if_readable(read: Callable[[], T], default: T) -> T:
    """Return what `read` returns, or `default` if a file is missing, too large or damaged."""
    try:
        return read()
    except (OSError, ValueError, yaml.YAMLError):
        return default


def _lines(path: Path) -> list[Object]:
    return _if_readable(lambda: [fields for _, fields in read_json_lines(path)], [])


def _json(path: Path) -> Any:
    return _if_readable(lambda: decode_json(_text(path) or ""), None)


def _text(path: Path) -> str | None:
    return _if_readable(lambda: read_small_file(path, RUN_FILE_BYTES, "none").decode(errors="replace"), None)
