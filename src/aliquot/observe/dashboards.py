"""Send metrics to W&B or MLflow from a separate process on the node of rank 0, so that no server can delay a run.

The process `python -m aliquot.observe.dashboards SERVICE RUN_DIR SIZE` follows the files in the run directory. The run
ends the process by closing its standard input, and shows its standard output as warnings. The file <service>.json
records the id of the run at the service and the bytes sent, so that a resumed run continues there. Each client reads
server, project and keys from its environment variables (WANDB_PROJECT, ...).
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import yaml

from aliquot.core.decode import BoundedLoader
from aliquot.core.errors import MissingToolError
from aliquot.core.python_command import python_command
from aliquot.core.small_files import open_unlinked, publish_text
from aliquot.observe.events import ENDS

_IDLE_INTERVALS = 20  # intervals to send the remaining metrics after the end of a run, once the client has started
_INTERVAL_S = 1.0
_SILENCE_S = 30.0  # without a sign of life of the process, after the end of a run
_RETRY_S = 10.0
_MAX_LINES = 40  # lines of metrics.jsonl per call of a client
_MLFLOW_STATUS = {"end": "FINISHED", "failed": "FAILED"}
_MAX_PARAMETERS, _MAX_METRICS, _MAX_VALUE = 100, 1000, 500  # per call of MLflow; characters of a value


def check_installed(services: Sequence[str]) -> None:
    """Raise UserError if the client package of a service is not installed."""
    for service in services:
        if service != "tensorboard" and importlib.util.find_spec(service) is None:
            raise MissingToolError(
                f"observe.report_to: {service} is not installed: pip install 'aliquot[{service}]', or leave it out"
            )


class Dashboard:
    """Starts the process that sends the metrics of the run directory, also of earlier attempts, to `service`.

    Args:
        warn: receives the errors that the process reports; logs/<service>.txt has its other output.
    """

    def __init__(self, service: str, metrics: Path, warn: Callable[[str], None]) -> None:
        self._service = service
        self._warn = warn
        directory = metrics.parent
        (directory / "logs").mkdir(exist_ok=True)
        self._log = directory / "logs" / f"{service}.txt"
        follow = python_command("-m", __name__, service, str(directory), str(metrics.stat().st_size))
        pipe = subprocess.PIPE
        with open_unlinked(self._log, "ab") as log:
            # In a new session, Ctrl-C in the terminal stops only the run, and this process can send the last metrics.
            self._process = subprocess.Popen(follow, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True)
        assert self._process.stdout is not None
        self._complaints = self._process.stdout.fileno()
        os.set_blocking(self._complaints, False)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Pass errors of the process to `warn`. The process itself reads metrics.jsonl, so `metrics` is not used."""
        self._pass_errors()

    def _pass_errors(self) -> bool:
        """Pass errors of the process to `warn`. Return False if the process has closed its output."""
        try:
            text = os.read(self._complaints, 1 << 16)
        except BlockingIOError:
            return True
        for line in filter(None, text.decode(errors="replace").splitlines()):  # an empty line is a sign of life
            self._warn(f"{self._service}: {line}; training goes on ({self._log})")
        return text != b""

    def close(self) -> None:
        """Wait until the process has sent all metrics, or has given up, or has stopped to give signs of life."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # signals the end of the run
        is_alive = True
        while is_alive and select.select([self._complaints], [], [], _SILENCE_S)[0]:
            is_alive = self._pass_errors()
        if is_alive:
            self._process.kill()
        if self._process.wait() != 0:
            self._warn(f"{self._service} does not have all of this run; metrics.jsonl has ({self._log})")


class WandbRun:
    """A run of W&B. Every method may raise any exception of the client."""

    def __init__(self, directory: Path, config: dict[str, Any], run_id: str | None) -> None:
        import wandb

        self.run_id = run_id or secrets.token_hex(4)
        options: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "aliquot"),
            "name": config["run"]["name"],
            "id": self.run_id,
            "resume": "allow",
            "dir": directory,
            "config": config,
            "settings": wandb.Settings(console="off"),
        }
        try:
            self._run = wandb.init(**options)
        except wandb.Error as error:  # no key, no server
            complain(f"{' '.join(str(error).split())[:200]}; written to {directory}/wandb, for `wandb sync`")
            self._run = wandb.init(**options, mode="offline")
        # A run that resumes from an older checkpoint repeats steps, which W&B's own step counter does not allow.
        self._run.define_metric("*", step_metric="step")

    def send(self, lines: list[dict[str, Any]]) -> None:
        """Send lines of metrics.jsonl, in order."""
        for line in lines:
            self._run.log({name: value for name, value in line.items() if isinstance(value, int | float)})

    def attach(self, file: Path) -> None:
        """Attach a file to the run, in place of an older file with the same name."""
        copied = Path(self._run.dir) / file.name  # a copy, because W&B would link to the original, which may be removed
        copied.write_bytes(file.read_bytes())
        self._run.save(str(copied), base_path=self._run.dir, policy="now")

    def end(self, how: str | None) -> None:
        """End the run with the final event: end, stopped or failed; None: the run was killed."""
        self._run.finish(exit_code=0 if how == "end" else 1)


class MlflowRun:
    """A run of MLflow, with the methods of WandbRun."""

    def __init__(self, directory: Path, config: dict[str, Any], run_id: str | None) -> None:
        # The client reads these variables when it is imported. Without them the client would retry a failed call for
        # minutes. `follow` retries failed calls instead.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        if run_id is not None:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "aliquot")
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing is not None else self._client.create_experiment(name)
        self.run_id = self._client.create_run(experiment, run_name=config["run"]["name"]).info.run_id
        parameters = [
            Param(f"{section}.{key}", str(value)[:_MAX_VALUE])
            for section, values in config.items()
            for key, value in (values or {}).items()
        ]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(self.run_id, params=parameters[first : first + _MAX_PARAMETERS])

    def send(self, lines: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, float(value), now, line["step"])
            for line in lines
            for name, value in line.items()
            if name != "step" and isinstance(value, int | float)
        ]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self.run_id, metrics[first : first + _MAX_METRICS])

    def attach(self, file: Path) -> None:
        self._client.log_artifact(self.run_id, str(file))

    def end(self, how: str | None) -> None:
        self._client.set_terminated(self.run_id, _MLFLOW_STATUS.get(how or "", "KILLED"))


class Follower:
    """Sends new lines of metrics.jsonl and changed files of the run directory to a service."""

    def __init__(self, service: str, directory: Path, size_bytes: int) -> None:
        """Args: size_bytes: size of metrics.jsonl when this attempt began, the upper bound of the bytes sent before."""
        self._open_run = WandbRun if service == "wandb" else MlflowRun
        self._directory = directory
        self._record = directory / f"{service}.json"
        record: dict[str, Any] = json.loads(self._record.read_text()) if self._record.exists() else {}
        self._run_id: str | None = record.get("run_id")
        self._sent_bytes = min(int(record.get("sent_bytes", 0)), size_bytes)
        self._attached: dict[str, int] = {}
        self._run: WandbRun | MlflowRun | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the client has started, and has opened the run at the service."""
        return self._run is not None

    def send(self) -> WandbRun | MlflowRun:
        """Send all new lines. Raises the errors of the client. Lines sent before an error are not sent again."""
        if self._run is None:
            config = yaml.load((self._directory / "config.yaml").read_text(encoding="utf-8"), Loader=BoundedLoader)
            self._run = self._open_run(self._directory, config, self._run_id)
            self._save_record(self._run.run_id)
        run = self._run
        with (self._directory / "metrics.jsonl").open("rb") as file:
            file.seek(self._sent_bytes)
            complete = [line for line in file if line.endswith(b"\n")]
        for first in range(0, len(complete), _MAX_LINES):
            lines = complete[first : first + _MAX_LINES]
            run.send([json.loads(line) for line in lines])
            self._sent_bytes += sum(map(len, lines))
            self._save_record(run.run_id)
        for name in ("config.yaml", "ledger.json"):
            path = self._directory / name
            if path.exists() and self._attached.get(name) != (changed := path.stat().st_mtime_ns):
                run.attach(path)
                self._attached[name] = changed
        return run

    def end(self) -> None:
        """Send the remaining metrics, and end the run at the service."""
        run = self.send()
        last = json.loads((self._directory / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1])["event"]
        run.end(last if last in ENDS else None)

    def _save_record(self, run_id: str) -> None:
        publish_text(self._record, json.dumps({"run_id": run_id, "sent_bytes": self._sent_bytes}) + "\n")


def follow(follower: Follower, over: threading.Event) -> int:
    """Send metrics until the run is over; return the exit code."""
    pause_s, last_complaint = _INTERVAL_S, ""
    while not over.wait(pause_s):
        try:
            follower.send()
            pause_s = _INTERVAL_S
        # Clients raise many kinds of errors, and no error may end this process.
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


def wait_for_idleness(follower: Follower, intervals: int, interval_s: float) -> None:
    """Return once `intervals` have passed without progress of the client's start: an imported module, or an open run.

    The start itself has no limit, because it takes seconds of computing, and a busy machine may run this process
    rarely. Each interval gives the run a sign of life.
    """
    idle, before = 0, (0, False)
    while idle < intervals:
        progress = (len(sys.modules), follower.is_connected)
        idle, before = (idle + 1, before) if progress == before else (0, progress)
        with suppress(OSError):  # the run was killed
            complain("")
        time.sleep(interval_s)


def complain(text: str) -> None:
    print(text, file=_person, flush=True)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def main(service: str, directory: str, size_bytes: str) -> int:
    over, follower = threading.Event(), Follower(service, Path(directory), int(size_bytes))

    def give_up_after_the_end() -> None:
        sys.stdin.buffer.read()
        over.set()
        # A client may wait for its server for minutes, in a call that cannot be interrupted.
        wait_for_idleness(follower, _IDLE_INTERVALS, _INTERVAL_S)
        with suppress(OSError):
            complain(f"the client had not finished {_IDLE_INTERVALS * _INTERVAL_S:g} s after the end of the run")
        os._exit(1)

    threading.Thread(target=give_up_after_the_end, daemon=True).start()
    os.nice(10)
    return follow(follower, over)


_person: TextIO = sys.stdout

if __name__ == "__main__":
    _person = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # print output of clients goes to the log
    status = main(*sys.argv[1:])
    with suppress(OSError):
        _person.close()
    os._exit(status)  # also ends threads of the client
