"""The process on the node of rank 0 that follows a run directory and sends its metrics to W&B or MLflow.

Its standard input closes at the end of the run. Its standard output is shown to the person. <service>.json records the
run of the service and the bytes sent, so that a resumed run continues that run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

import yaml

from aliquot.core.decode import BoundedLoader
from aliquot.core.small_files import publish_text
from aliquot.observe.dashboard_services import MlflowRun, Service, WandbRun
from aliquot.observe.events import ENDS

LAST_WORDS_S = 20.0  # time to send the rest after the end of a run
_INTERVAL_S = 1.0
_RETRY_S = 10.0
_MAX_LINES = 40  # per call


class Follower:
    """Sends the new lines and files of `directory`."""

    def __init__(self, service: str, directory: Path, size_bytes: int) -> None:
        """Args: size_bytes: size of metrics.jsonl when this attempt began; the recorded position cannot exceed it."""
        self._name = service
        self._directory = directory
        self._record = directory / f"{service}.json"
        record: dict[str, Any] = json.loads(self._record.read_text()) if self._record.exists() else {}
        self._run_id: str | None = record.get("run_id")
        self._sent_bytes = min(int(record.get("sent_bytes", 0)), size_bytes)
        self._attached: dict[str, int] = {}
        self._service: Service | None = None

    def send(self) -> None:
        """Send all new lines. Raises the client's errors; lines sent before an error are not sent again."""
        if self._service is None:
            config = yaml.load((self._directory / "config.yaml").read_text(encoding="utf-8"), Loader=BoundedLoader)
            self._service = open_run(self._name, self._directory, config, self._run_id)
            self._save_record()
        with (self._directory / "metrics.jsonl").open("rb") as file:
            file.seek(self._sent_bytes)
            complete = [line for line in file if line.endswith(b"\n")]
        for first in range(0, len(complete), _MAX_LINES):
            lines = complete[first : first + _MAX_LINES]
            self._service.send([json.loads(line) for line in lines])
            self._sent_bytes += sum(map(len, lines))
            self._save_record()
        for name in ("config.yaml", "ledger.json"):
            path = self._directory / name
            if path.exists() and self._attached.get(name) != (changed := path.stat().st_mtime_ns):
                self._service.attach(path)
                self._attached[name] = changed

    def end(self) -> None:
        self.send()
        assert self._service is not None
        self._service.end(_final_event(self._directory / "events.jsonl"))

    def _save_record(self) -> None:
        assert self._service is not None
        record = {"run_id": self._service.run_id, "sent_bytes": self._sent_bytes}
        publish_text(self._record, json.dumps(record) + "\n")


def open_run(name: str, directory: Path, config: dict[str, Any], run_id: str | None) -> Service:
    """Begin a run of the service, or continue the one with `run_id`."""
    if name == "wandb":
        return WandbRun(directory, config, run_id, complain)
    return MlflowRun(config, run_id)


def follow(follower: Follower, over: threading.Event) -> int:
    """Send metrics until the run is over; return the exit code."""
    pause_s, last_complaint = _INTERVAL_S, ""
    while not over.wait(pause_s):
        try:
            follower.send()
            pause_s = _INTERVAL_S
        # Clients raise many kinds of errors, and none of them must end this process.
        except Exception as error:
            pause_s = _RETRY_S
            if last_complaint != (last_complaint := _one_line(error)):
                complain(last_complaint)
    try:
        follower.end()
    except Exception as error:
        complain(_one_line(error))
        return 1
    return 0


def complain(text: str) -> None:
    print(text, file=_person, flush=True)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _final_event(events: Path) -> str | None:
    last = json.loads(events.read_text(encoding="utf-8").splitlines()[-1])
    return last["event"] if last["event"] in ENDS else None


def main(service: str, directory: str, size_bytes: str) -> int:
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        over.set()
        # A client may wait for its server for minutes, in a call that cannot be interrupted.
        timer = threading.Timer(LAST_WORDS_S, os._exit, [1])
        timer.daemon = True
        timer.start()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    os.nice(10)
    return follow(Follower(service, Path(directory), int(size_bytes)), over)


_person: TextIO = sys.stdout

if __name__ == "__main__":
    _person = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of clients
    status = main(*sys.argv[1:])
    _person.close()
    os._exit(status)  # ends threads of the client, whose run has ended
