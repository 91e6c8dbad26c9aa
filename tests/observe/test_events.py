"""events.jsonl survives being killed in the middle of a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aliquot.core.errors import StorageError
from aliquot.observe import events
from aliquot.observe.events import Events, command_line


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
