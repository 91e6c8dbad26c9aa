"""The process beside rank 0 that follows a run directory and sends what it finds to W&B or MLflow.

Its standard input closes when the run is over, however it ended. What it writes to its standard output is for the
person. What has been sent, and to which run of the service, is kept in <service>.json: a resumed run goes on there.
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

LAST_WORDS_S = 20.0  # from the end of a run on
_ASKED_S = 1.0
_RETRY_S = 10.0
_LINES = 40  # sent at once


class Follower:
    """Sends what is new in `directory` each time it is asked."""

    def __init__(self, service: str, directory: Path, size_bytes: int) -> None:
        """`size_bytes`: of metrics.jsonl when this attempt began; of what was sent before, no more counts as sent."""
        self._name = service
        self._directory = directory
        self._kept = directory / f"{service}.json"
        kept: dict[str, Any] = json.loads(self._kept.read_text()) if self._kept.exists() else {}
        self._run_id: str | None = kept.get("run_id")
        self._sent_bytes = min(int(kept.get("sent_bytes", 0)), size_bytes)
        self._attached: dict[str, int] = {}
        self._service: Service | None = None

    def send(self) -> None:
        """All that there is. Raises whatever the client raises; what was sent until then is not sent again."""
        if self._service is None:
            config = yaml.load((self._directory / "config.yaml").read_text(encoding="utf-8"), Loader=BoundedLoader)
            self._service = begin(self._name, self._directory, config, self._run_id)
            self._keep()
        with (self._directory / "metrics.jsonl").open("rb") as file:
            file.seek(self._sent_bytes)
            whole = [line for line in file if line.endswith(b"\n")]
        for first in range(0, len(whole), _LINES):
            some = whole[first : first + _LINES]
            self._service.send([json.loads(line) for line in some])
            self._sent_bytes += sum(map(len, some))
            self._keep()
        for name in ("config.yaml", "ledger.json"):
            path = self._directory / name
            if path.exists() and self._attached.get(name) != (changed := path.stat().st_mtime_ns):
                self._service.attach(path)
                self._attached[name] = changed

    def end(self) -> None:
        self.send()
        assert self._service is not None
        self._service.end(_how_it_ended(self._directory / "events.jsonl"))

    def _keep(self) -> None:
        assert self._service is not None
        kept = {"run_id": self._service.run_id, "sent_bytes": self._sent_bytes}
        publish_text(self._kept, json.dumps(kept) + "\n")


def begin(name: str, directory: Path, config: dict[str, Any], run_id: str | None) -> Service:
    """A run of the service, or the one with that id."""
    if name == "wandb":
        return WandbRun(directory, config, run_id, tell)
    return MlflowRun(config, run_id)


def follow(follower: Follower, over: threading.Event) -> int:
    """Until the run is over; the exit code."""
    pause_s, said = _ASKED_S, ""
    while not over.wait(pause_s):
        try:
            follower.send()
            pause_s = _ASKED_S
        # Servers fail in more ways than can be named, and none of them is the run's concern.
        except Exception as error:
            pause_s = _RETRY_S
            if said != (said := _in_a_line(error)):
                tell(said)
    try:
        follower.end()
    except Exception as error:
        tell(_in_a_line(error))
        return 1
    return 0


def tell(text: str) -> None:
    print(text, file=_person, flush=True)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _how_it_ended(events: Path) -> str | None:
    last = json.loads(events.read_text(encoding="utf-8").splitlines()[-1])
    return last["event"] if last["event"] in ENDS else None


def main(service: str, directory: str, size_bytes: str) -> int:
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        over.set()
        # A client may wait for its server for minutes, in a call that nothing ends.
        timer = threading.Timer(LAST_WORDS_S, os._exit, [1])
        timer.daemon = True
        timer.start()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    os.nice(10)
    return follow(Follower(service, Path(directory), int(size_bytes)), over)


_person: TextIO = sys.stdout

if __name__ == "__main__":
    _person = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what clients print
    status = main(*sys.argv[1:])
    _person.close()
    os._exit(status)  # whatever a client still wants to do: its run has been ended
