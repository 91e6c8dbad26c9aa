"""A run directory as the report sees it: whatever is there, of a run that ended, goes on or was killed.

Nothing in the files is trusted: lines that were cut short are left out, and numbers that are none count as missing.
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

BEGINS = ("start", "resume")  # events of an attempt's beginning
_ABSURD = 1e24
_MOST_BYTES = 1 << 30  # of a file: the curves of millions of steps

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
    evaluations: list[Object]  # of the main set: the one that has no name, else the first
    evaluated: list[Object]  # of all sets, as they were logged
    events: list[Object]
    rows: list[Object]  # of the ledger
    plan: Object  # as `aliquot plan --json` prints it, made when the run began; empty: none was recorded
    machine: Object
    checkpoints: dict[int, int]  # step -> size in bytes of those that lie there now
    doctor: Any  # doctor.json as it is; None: there is none
    status: Status

    @property
    def attempts(self) -> list[Object]:
        """What was written at each start and resume."""
        return [event for event in self.events if event.get("event") in BEGINS]

    @property
    def beginnings(self) -> list[float]:
        """The steps after which the attempts began that the curve consists of: others were taken back, as a later one
        went on from before them."""
        found: list[float] = []
        for attempt in reversed(self.attempts):
            step = number(attempt.get("step"))
            if step is not None and (not found or step < found[-1]):
                found.append(step)
        return found[::-1]

    @property
    def about(self) -> Object:
        """The newest attempt's facts."""
        return self.attempts[-1] if self.attempts else {}

    def points(self, key: str, lines: list[Object] | None = None, x: str = "step") -> Points:
        """(`x`, value) of the logged steps (or of `lines`) where `x` and `key` are numbers."""
        found = [(number(line.get(x)), number(line.get(key))) for line in (self.steps if lines is None else lines)]
        return [(at, value) for at, value in found if at is not None and value is not None]

    def setting(self, section: str, key: str) -> Any:
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None

    @property
    def first_steps(self) -> set[float]:
        """The first step of each attempt: it compiles and faults pages in."""
        return {step + 1 for step in self.beginnings}


def read_run(path: Path) -> Run:
    """Raises UserError where `path` is not the directory of a run."""
    directory = RunDirectory(path)
    text = _text(path / "config.yaml")
    if text is None and (message := _last_words(directory)) is not None:
        raise RunDirectoryError(f"this run ended before it began: {message}", path)
    if text is None or not text.startswith(HEADER):
        raise RunDirectoryError("this is not a run directory: a run has a config.yaml that aliquot wrote", path)
    config = _yaml(text)
    lines = _lines(directory.metrics)
    events = _lines(directory.events)
    ledger = _json(directory.ledger)
    ledger = ledger if isinstance(ledger, dict) else {}
    rows, plan = ledger.get("rows"), ledger.get("plan")
    if not isinstance(plan, dict):  # before the first step the start alone tells of it
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
        evaluations=[_of_main_set(line) for line in evaluated],
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
    """The names of what was evaluated on, "" for what has none, in the order of the lines."""
    keys = [key for line in lines for key in line if key.startswith("eval_") and key.endswith("loss")]
    return list(dict.fromkeys(key.removeprefix("eval_").removesuffix("loss").removesuffix("_") for key in keys))


def _of_main_set(line: Object) -> Object:
    """`line` with the numbers of the first set under the names of one that has none, where all have names."""
    if "eval_loss" in line:
        return line
    prefix = f"eval_{evaluation_sets([line])[0]}_"
    return {**line, **{f"eval_{key.removeprefix(prefix)}": line[key] for key in line if key.startswith(prefix)}}


def number(value: Any) -> float | None:
    """A number that can be one of a run, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _ABSURD:
        return None
    return float(value)


def _status(path: Path, events: list[Object], steps: list[Object], config: Object) -> Status:
    last = next((event for event in reversed(events) if event.get("event") in (*ENDS, *BEGINS)), None)
    if last is not None and last["event"] == "end":
        early = any(event.get("event") == "stopped_early" for event in events)
        return Status("complete", "it stopped early" if early else "all steps are done")
    if last is not None and last["event"] in ENDS:
        unsaid = {"stopped": "told to stop by SIGTERM", "failed": "it ended with an error"}
        return Status(last["event"], str(last.get("text", "")) or unsaid[last["event"]])
    if _is_locked(path / LOCK):
        return Status("running", "a process is training into this directory now")
    if last is None and not steps:
        return Status("empty", "no step has been logged")
    errors = sorted((path / "logs").glob("rank-*.error.json"))
    told = [error for error in (_json(file) for file in errors) if isinstance(error, dict)]
    causes = [error for error in told if error.get("kind") != "peer_lost"]
    if causes:
        return Status("failed", f"rank {causes[0].get('rank')}: {causes[0].get('message')}")
    return Status("killed", "it ended without a last word: killed, out of memory, or a lost machine")


def _is_locked(lock: Path) -> bool:
    """Whether a living process holds the run's lock."""
    try:
        with lock.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing gives it back at once
            except BlockingIOError:
                return True
    except OSError:
        pass
    return False


def _checkpoints(directory: Path) -> dict[int, int]:
    found = {}
    for path in directory.glob("step-*") if directory.is_dir() else ():
        step = path.name.removeprefix("step-")
        if step.isdecimal() and path.is_dir():
            try:
                found[int(step)] = sum(file.stat().st_size for file in path.iterdir())
            except OSError:  # retention removed it meanwhile
                continue
    return dict(sorted(found.items()))


def _lines(path: Path) -> list[Object]:
    """The objects of a file of JSON lines, without what is not one: the last line of a killed run may be half."""
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


def _last_words(directory: RunDirectory) -> str | None:
    """What a rank has left in the directory of a run that came to no config.yaml."""
    told = (_json(file) for file in sorted(directory.logs.glob("rank-*.error.json")))
    return next((str(each["message"]) for each in told if isinstance(each, dict) and "message" in each), None)


def _text(path: Path) -> str | None:
    try:
        return read_small_file(path, _MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None
