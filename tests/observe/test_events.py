"""events.jsonl survives being killed in the middle of a line.

Every file of a run directory may be of any kind and hold anything: it counts as absent, or one line names it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from aliquot.checkpoint.directories import newest
from aliquot.core import run_lock
from aliquot.core.errors import StorageError, UserError, writing
from aliquot.core.run_lock import BEATING_LOCK, LOCK
from aliquot.distributed.leader_lease import ROUNDS, Claims, is_finished, newest_round
from aliquot.observe import events
from aliquot.observe.events import Events, command_line
from aliquot.observe.metrics import MetricsFile, last_point
from aliquot.observe.report.page import write_report
from aliquot.observe.run_directory import HEADER, RunDirectory
from aliquot.run.hub_upload import _last_losses


def test_events_are_appended_and_a_torn_line_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Events(path, enabled=True).write("start", 0, model="x")
    with path.open("a") as file:
        file.write('{"event": "check')
    again = Events(path, enabled=True)
    again.write("resume", 3)
    again.write("end", 6)
    lines = path.read_text().splitlines()
    assert [json.loads(lines[i])["event"] for i in (0, 2, 3)] == ["start", "resume", "end"]
    assert json.loads(lines[0])["model"] == "x"


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        events, "open_unlinked", lambda path, mode, **how: os.fdopen(os.open("/dev/full", os.O_RDWR), mode, **how)
    )
    with pytest.raises(StorageError, match=r"events\.jsonl: cannot write: No space left on device"):
        Events(tmp_path / "events.jsonl", enabled=True).write("start", 0)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    Events(tmp_path / "events.jsonl", enabled=False).write("start", 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/x/bin/aliquot", "train", "a b.yaml"], "aliquot train 'a b.yaml'"),
        (["/x/aliquot/__main__.py", "train", "c.yaml"], "aliquot train c.yaml"),
        (["mine.py", "1"], "python mine.py 1"),
    ],
)
def test_the_command_can_be_typed_again(argv: list[str], line: str) -> None:
    assert command_line(argv) == line


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(7_700_000_000)


CONTENTS = {
    "empty": b"",
    "bytes": b"\xff\xfe\x00junk\n",
    "deep": b"[" * 200_000,
    "list": b"[1, 2]\n",
    "digits": b"9" * 5000,
    "types": b'{"step": [], "rows": 3, "event": {}, "plan": 1, "addresses": 5}\n',
    "lines": b'{"step": null, "loss": 1.0}\n{"event": "end", "step": {}, "time": "x", "text": []}\n"a"\n',
}
PUTS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
    "link": lambda path: path.symlink_to("/proc/self/environ"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "huge": huge,
    **{name: partial(Path.write_bytes, data=data) for name, data in CONTENTS.items()},
}


def lock(run: Path) -> None:
    with RunDirectory(run).lock.hold():
        pass


def lease(run: Path) -> None:
    claims = Claims(run)
    assert claims.newest() is None or newest_round(run) == 1
    claims.beaten(1)


def metrics(run: Path) -> None:
    assert last_point(run / "metrics.jsonl", "step") == (0, None)
    assert _last_losses(run / "metrics.jsonl", 9) == {}
    MetricsFile(run / "metrics.jsonl", 3).close()


def write_lines(run: Path) -> None:
    log = Events(run / "events.jsonl", enabled=True)
    log.write("start", 0)
    log.close()


def report(run: Path) -> None:
    with writing(run):
        write_report([run], run / "report.html")


def finish(run: Path) -> None:
    claims = Claims(run)
    assert not is_finished(run, "mark")
    claims.finish("mark")


def checkpoint(run: Path) -> None:
    assert newest(run / "checkpoints") is None


def day(run: Path) -> None:
    RunDirectory(run).day()


READERS = {
    lock: [LOCK, BEATING_LOCK],
    lease: [f"{ROUNDS}/00000001.json", f"{ROUNDS}/1.json"],
    finish: [f"{ROUNDS}/finished"],
    metrics: ["metrics.jsonl"],
    write_lines: ["events.jsonl"],
    report: [
        "metrics.jsonl", "events.jsonl", "ledger.json", "doctor.json", LOCK, "report.html", "logs/rank-0.error.json",
    ],
    checkpoint: ["checkpoints/step-00000001/manifest.json"],
    day: ["chat-template-date.txt"],
}  # fmt: skip


@pytest.mark.parametrize("put", PUTS)
def test_file_of_any_kind_is_absent_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: str) -> None:
    monkeypatch.setattr(run_lock, "WATCH_S", 0.01)
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks here")))
    for number, (read, name) in enumerate((read, name) for read, names in READERS.items() for name in names):
        run = tmp_path / f"run{number}"
        (run / name).parent.mkdir(parents=True)
        (run / "config.yaml").write_text(f"{HEADER}\nrun: {{name: mine}}\n")
        PUTS[put](run / name)
        try:
            read(run)
        except UserError as error:
            assert name.rpartition("/")[2] in error.line and "\n" not in str(error), (name, error.line)
            assert error.exit_code == 2
