"""Read the directory of a complete, running or killed run for the report.

The files are not trusted. Truncated lines are skipped, and implausible numbers count as missing.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

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
    evaluations: list[Object]  # logged evaluations of the set without a name, or of the first set
    evaluated: list[Object]  # logged evaluations of all sets
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
        steps: list[float] = []
        for attempt in reversed(self.attempts):
            step = number(attempt.get("step"))
            if step is not None and (not steps or step < steps[-1]):
                steps.append(step)
        return steps[::-1]

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

    def setting(self, section: str, key: str) -> Any:
        return _object(self.config.get(section)).get(key)

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
        counted = {id(line) for line in self.timed()}
        weights: list[tuple[float, Object]] = []
        before = 0.0
        for line in self.steps:
            step = number(line.get("step")) or 0.0
            if id(line) in counted:
                weights.append((max(1.0, step - before), line))  # a line stands for all steps since the previous line
            before = step
        steps = sum(weight for weight, _ in weights) or 1.0
        return {
            part: sum(weight * (number(line.get(f"{part}_s")) or 0.0) for weight, line in weights) / steps
            for part in PARTS
        }

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
    config = _yaml(text)
    lines, events, ledger = _lines(directory.metrics), _lines(directory.events), _object(_json(directory.ledger))
    rows = ledger.get("rows")
    steps = [line for line in lines if "loss" in line]
    evaluated = [line for line in lines if evaluation_sets([line])]
    return Run(
        path=path,
        name=str(_object(config.get("run")).get("name") or path.name),
        config=config,
        config_text=text,
        steps=steps,
        evaluations=[_main_set(line) for line in evaluated],
        evaluated=evaluated,
        events=events,
        rows=[row for row in rows if isinstance(row, dict) and row.get("phase") in PHASES]
        if isinstance(rows, list)
        else [],
        # Before the first step, only the start event has the plan.
        plan=next((plan for plan in (ledger.get("plan"), *_newest(events, "plan")) if isinstance(plan, dict)), {}),
        machine=_object(next(_newest(events, "machine"), ledger.get("machine"))),
        checkpoints=_checkpoints(directory.checkpoints),
        doctor=_json(path / "doctor.json"),
        status=_status(path, events, steps),
    )


def _newest(events: list[Object], key: str) -> Iterator[Object]:
    return (event[key] for event in reversed(events) if isinstance(event.get(key), dict))


def _object(value: Any) -> Object:
    return value if isinstance(value, dict) else {}


def evaluation_sets(lines: list[Object]) -> list[str]:
    """Return the names of the evaluation sets in the order of the lines, "" for the set without a name."""
    keys = [key for line in lines for key in line if key.startswith("eval_") and key.endswith("loss")]
    return list(dict.fromkeys(key.removeprefix("eval_").removesuffix("loss").removesuffix("_") for key in keys))


def _main_set(line: Object) -> Object:
    """Return `line` with the numbers of the main evaluation set under the keys `eval_loss`, `eval_perplexity`, ..."""
    if "eval_loss" in line:
        return line
    prefix = f"eval_{evaluation_sets([line])[0]}_"
    return {**line, **{f"eval_{key.removeprefix(prefix)}": line[key] for key in line if key.startswith(prefix)}}


def number(value: Any) -> float | None:
    """Return `value` if it is a plausible number, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_NUMBER:
        return None
    return float(value)


def median(points: Points) -> float:
    return sorted(value for _, value in points)[len(points) // 2]


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
    errors = map(_json, sorted((path / "logs").glob("rank-*.error.json")))
    return [error for error in errors if isinstance(error, dict)]


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
    for path in directory.glob("step-*") if directory.is_dir() else ():
        step = path.name.removeprefix("step-")
        if step.isdecimal() and path.is_dir():
            with suppress(OSError):  # retention has just removed the checkpoint
                sizes[int(step)] = sum(file.stat().st_size for file in path.iterdir())
    return dict(sorted(sizes.items()))


def _lines(path: Path) -> list[Object]:
    """Read the objects of a JSON lines file; none if the file cannot be read."""
    try:
        return [fields for _, fields in read_json_lines(path)]
    except OSError:
        return []


def _json(path: Path) -> Any:
    try:
        return decode_json(_text(path) or "")
    except ValueError:
        return None


def _yaml(text: str) -> Object:
    try:
        return _object(load_yaml(text)[0])
    except (yaml.YAMLError, ValueError):
        return {}


def _text(path: Path) -> str | None:
    try:
        return read_small_file(path, RUN_FILE_BYTES, "none").decode(errors="replace")
    except (OSError, ValueError):
        return None
