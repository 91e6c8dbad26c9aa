"""Read a run directory for the report: a run that ended, that continues, or that was killed.

The files are not trusted: truncated lines are skipped, and values that are no plausible numbers count as missing.
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aliquot.core.decode import decode_json, load_yaml
from aliquot.core.errors import RunDirectoryError
from aliquot.core.run_lock import LOCK
from aliquot.core.small_files import read_small_file
from aliquot.observe.events import ENDS
from aliquot.observe.ledger import PHASES
from aliquot.observe.run_directory import HEADER, RunDirectory

BEGINS = ("start", "resume")  # the first event of an attempt
_MAX_NUMBER = 1e24
_MAX_BYTES = 1 << 30  # of a file: enough for metrics of millions of steps

Object = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Status:
    """`word`: complete, running, stopped, failed, killed or empty; `detail` says more."""

    word: str
    detail: str


@dataclass(frozen=True)
class Run:
    path: Path
    name: str
    config: Object
    config_text: str | None
    steps: list[Object]  # logged steps, by step
    evaluations: list[Object]  # logged evaluations of the main set: the set without a name, or else the first
    evaluated: list[Object]  # logged evaluations of all sets
    events: list[Object]
    rows: list[Object]  # of the ledger
    plan: Object  # the plan of the run, as `aliquot plan --json` prints it; empty if none was recorded
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
        """The steps after which those attempts began that contribute to the metrics.

        Later attempts that resumed from an earlier step have replaced the other attempts.
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

    def points(self, key: str, lines: list[Object] | None = None, x: str = "step") -> Points:
        """Return (`x`, `key`) of the logged steps, or of `lines`, with numbers for both."""
        pairs = [(number(line.get(x)), number(line.get(key))) for line in (self.steps if lines is None else lines)]
        return [(at, value) for at, value in pairs if at is not None and value is not None]

    def setting(self, section: str, key: str) -> Any:
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None

    @property
    def first_steps(self) -> set[float]:
        """The first step of each attempt, which compiles and faults pages in."""
        return {step + 1 for step in self.beginnings}


def read_run(path: Path) -> Run:
    """Read a run. Raises UserError if `path` is no run directory."""
    directory = RunDirectory(path)
    text = _text(path / "config.yaml")
    if text is None and (message := _early_error(directory)) is not None:
        raise RunDirectoryError(f"this run ended before it began: {message}", path)
    if text is None or not text.startswith(HEADER):
        raise RunDirectoryError("this is not a run directory: a run has a config.yaml that aliquot wrote", path)
    config = _yaml(text)
    lines = _lines(directory.metrics)
    events = _lines(directory.events)
    ledger = _json(directory.ledger)
    ledger = ledger if isinstance(ledger, dict) else {}
    rows, plan = ledger.get("rows"), ledger.get("plan")
    if not isinstance(plan, dict):  # before the first step only the start event holds the plan
        plan = next((event["plan"] for event in reversed(events) if isinstance(event.get("plan"), dict)), {})
    rows = rows if isinstance(rows, list) else []
    machine = next(
        (event["machine"] for event in reversed(events) if isinstance(event.get("machine"), dict)),
        ledger.get("machine"),
    )
    run_section = config.get("run")
    name = run_section.get("name") if isinstance(run_section, dict) else None
    steps = [line for line in lines if "loss" in line]
    evaluated = [line for line in lines if evaluation_sets([line])]
    return Run(
        path=path,
        name=str(name) if name else path.name,
        config=config,
        config_text=text,
        steps=steps,
        evaluations=[_main_set(line) for line in evaluated],
        evaluated=evaluated,
        events=events,
        rows=[row for row in rows if isinstance(row, dict) and row.get("phase") in PHASES],
        plan=plan,
        machine=machine if isinstance(machine, dict) else {},
        checkpoints=_checkpoints(directory.checkpoints),
        doctor=_json(path / "doctor.json"),
        status=_status(path, events, steps, config),
    )


def evaluation_sets(lines: list[Object]) -> list[str]:
    """Return the names of the evaluation sets in the order of the lines, "" for the set without a name."""
    keys = [key for line in lines for key in line if key.startswith("eval_") and key.endswith("loss")]
    return list(dict.fromkeys(key.removeprefix("eval_").removesuffix("loss").removesuffix("_") for key in keys))


def _main_set(line: Object) -> Object:
    """Return `line` with the numbers of the main set under the keys of a set without a name."""
    if "eval_loss" in line:
        return line
    prefix = f"eval_{evaluation_sets([line])[0]}_"
    return {**line, **{f"eval_{key.removeprefix(prefix)}": line[key] for key in line if key.startswith(prefix)}}


def number(value: Any) -> float | None:
    """Return `value` if it is a plausible number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_NUMBER:
        return None
    return float(value)


def _status(path: Path, events: list[Object], steps: list[Object], config: Object) -> Status:
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
    errors = sorted((path / "logs").glob("rank-*.error.json"))
    messages = [error for error in (_json(file) for file in errors) if isinstance(error, dict)]
    causes = [error for error in messages if error.get("kind") != "peer_lost"]
    if causes:
        return Status("failed", f"rank {causes[0].get('rank')}: {causes[0].get('message')}")
    return Status("killed", "it ended without a last word: killed, out of memory, or a lost machine")


def _is_locked(lock: Path) -> bool:
    """Return whether a process holds the run's lock."""
    try:
        with lock.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases it at once
            except BlockingIOError:
                return True
    except OSError:
        pass
    return False


def _checkpoints(directory: Path) -> dict[int, int]:
    sizes = {}
    for path in directory.glob("step-*") if directory.is_dir() else ():
        step = path.name.removeprefix("step-")
        if step.isdecimal() and path.is_dir():
            try:
                sizes[int(step)] = sum(file.stat().st_size for file in path.iterdir())
            except OSError:  # retention has just removed the checkpoint
                continue
    return dict(sorted(sizes.items()))


def _lines(path: Path) -> list[Object]:
    """Read the objects of a JSON lines file; skip other lines, because a killed run may leave a truncated line."""
    values = map(_parsed, (_text(path) or "").split("\n"))
    return [value for value in values if isinstance(value, dict)]


def _json(path: Path) -> Any:
    return _parsed(_text(path) or "")


def _parsed(text: str) -> Any:
    try:
        return decode_json(text)
    except ValueError:
        return None


def _yaml(text: str) -> Object:
    try:
        value, _ = load_yaml(text)
    except (yaml.YAMLError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _early_error(directory: RunDirectory) -> str | None:
    """Return the error of a rank that ended before the run wrote config.yaml."""
    errors = (_json(file) for file in sorted(directory.logs.glob("rank-*.error.json")))
    return next((str(error["message"]) for error in errors if isinstance(error, dict) and "message" in error), None)


def _text(path: Path) -> str | None:
    try:
        return read_small_file(path, _MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None
