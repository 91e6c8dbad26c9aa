"""Send metrics from threads of rank 0, so that no server can delay a step: to W&B, MLflow and the status of a TrainJob.

The thread of a dashboard reads metrics.jsonl, so lines that a server has missed are sent later. The file <service>.json
records the id of the run at the service and the bytes sent, so that a resumed run continues there. Each client reads
server, project and keys from its environment variables (WANDB_PROJECT, ...).

The status follows the protocol of transformers' KubeflowCallback. With the feature gate TrainJobRuntimeStatus, the
controller of Kubeflow Trainer sets three environment variables of a pod: a URL, the path of its CA certificate, and the
path of a token. Failed posts are dropped.
"""

from __future__ import annotations

import http.client
import importlib
import importlib.util
import json
import os
import secrets
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aliquot.core.decode import load_yaml, read_json
from aliquot.core.errors import MissingToolError
from aliquot.core.small_files import publish_text

_INTERVAL_S, _RETRY_S = 1.0, 10.0
_END_S = 20.0  # to send the remaining metrics after the last step
_MAX_LINES = 40  # lines of metrics.jsonl per call of a client
_MLFLOW_STATUS = {"end": "FINISHED", "failed": "FAILED"}
_MAX_PARAMETERS, _MAX_METRICS, _MAX_VALUE = 100, 1000, 500  # per call of MLflow; characters of a value
# The clients read these variables when they are imported. By its defaults, MLflow would retry a call for minutes.
_ENVIRONMENT = {
    "WANDB_SILENT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_DISABLED = "DISABLE_KUBEFLOW_INTEGRATION"
_POST_INTERVAL_S, _POST_TIMEOUT_S = 5.0, 5.0


def check_installed(services: Sequence[str]) -> None:
    """Raise UserError if the client package of a service is not installed."""
    for service in services:
        if service != "tensorboard" and importlib.util.find_spec(service) is None:
            raise MissingToolError(
                f"observe.report_to: {service} is not installed: pip install 'aliquot[{service}]', or leave it out"
            )


class WandbRun:
    """A run of W&B. Every method may raise any exception of the client."""

    def __init__(
        self, directory: Path, config: dict[str, Any], run_id: str | None, warn: Callable[[str], None]
    ) -> None:
        import wandb

        self.run_id = run_id or secrets.token_hex(4)
        options: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "aliquot"),
            "name": config["run"]["name"],
            "id": self.run_id,
            "resume": "allow",
            "dir": directory,
            "config": config,
            "settings": wandb.Settings(console="off", init_timeout=_RETRY_S, finish_timeout=_END_S / 2),
        }
        try:
            self._run = wandb.init(**options)
        except wandb.Error as error:  # no key, no server
            warn(f"{error}; written to {directory}/wandb, for `wandb sync`")
            wandb.teardown()  # otherwise the id of the run would count as used
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

    def end(self, how: str) -> None:
        """End the run with the last event: `end`, `stopped` or `failed`; any other: the run was killed."""
        self._run.finish(exit_code=0 if how == "end" else 1)


class MlflowRun:
    """A run of MLflow, with the methods of WandbRun."""

    def __init__(
        self, directory: Path, config: dict[str, Any], run_id: str | None, warn: Callable[[str], None]
    ) -> None:
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

    def end(self, how: str) -> None:
        self._client.set_terminated(self.run_id, _MLFLOW_STATUS.get(how, "KILLED"))


class Dashboard:
    """Sends metrics.jsonl, also of earlier attempts, and changed files of the run directory to `service`.

    Args:
        warn: receives the first error of the client, and whether metrics are missing at the end.
    """

    def __init__(self, service: str, metrics: Path, warn: Callable[[str], None]) -> None:
        os.environ.update(_ENVIRONMENT | os.environ)
        importlib.import_module(service)  # here, because a busy machine may need longer than the limit at the end
        self._open_run = WandbRun if service == "wandb" else MlflowRun
        self._service, self._metrics, self._warn = service, metrics, warn
        self._record = metrics.with_name(f"{service}.json")
        record = read_json(self._record) if self._record.exists() else {}
        self._run_id: str | None = record.get("run_id")
        sent_bytes = record.get("sent_bytes")
        self._sent_bytes = min(sent_bytes, metrics.stat().st_size) if isinstance(sent_bytes, int) else 0
        self._attached: dict[str, int] = {}
        self._run: WandbRun | MlflowRun | None = None
        self._problem, self._has_warned, self._is_complete = "", False, False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"aliquot-{service}", daemon=True)
        self._thread.start()

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Show the first problem of the client. The thread reads metrics.jsonl, so `metrics` is not used."""
        if self._problem and not self._has_warned:
            self._has_warned = True
            self._warn(f"{self._service}: {self._problem}; training goes on")

    def close(self) -> None:
        """Wait until the thread has sent all metrics, but not longer than `_END_S`."""
        self._over.set()
        self._thread.join(_END_S)
        self.write({})
        if not self._is_complete:
            self._warn(f"{self._service} does not have all of this run; metrics.jsonl has")

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last, pause_s = self._over.is_set(), _INTERVAL_S
            try:
                self._send(is_last)
                self._is_complete = is_last
            # Clients raise many kinds of errors, and no error may end this thread.
            except Exception as error:
                self._complain(f"{type(error).__name__}: {error}")
                pause_s = _RETRY_S
            self._over.wait(pause_s)

    def _send(self, is_last: bool) -> None:
        """Send all new lines and files; if `is_last`, end the run. Lines sent before an error are not sent again."""
        directory = self._metrics.parent
        if self._run is None:
            config = load_yaml((directory / "config.yaml").read_text(encoding="utf-8"))[0]
            self._run = self._open_run(directory, config, self._run_id, self._complain)
            self._save_record()
        with self._metrics.open("rb") as file:
            file.seek(self._sent_bytes)
            complete = [line for line in file if line.endswith(b"\n")]
        for first in range(0, len(complete), _MAX_LINES):
            lines = complete[first : first + _MAX_LINES]
            self._run.send([json.loads(line) for line in lines])
            self._sent_bytes += sum(map(len, lines))
            self._save_record()
        for path in (directory / "config.yaml", directory / "ledger.json"):
            if path.exists() and self._attached.get(path.name) != (changed := path.stat().st_mtime_ns):
                self._run.attach(path)
                self._attached[path.name] = changed
        if is_last:
            last_event = (directory / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1]
            self._run.end(json.loads(last_event)["event"])

    def _save_record(self) -> None:
        assert self._run is not None
        publish_text(self._record, json.dumps({"run_id": self._run.run_id, "sent_bytes": self._sent_bytes}) + "\n")

    def _complain(self, text: str) -> None:
        self._problem = self._problem or " ".join(text.split())[:300]


class KubeflowStatus:
    """Posts progress, remaining time and the newest value of each metric every five seconds, and at the end."""

    def __init__(self, environ: Mapping[str, str], total_steps: int) -> None:
        self._url, self._ca_cert, self._token = environ[URL], environ.get(CA_CERT), environ.get(TOKEN)
        self.total_steps = total_steps  # less if the run stops early
        self._newest: dict[str, float] = {"step": 0}
        self._updated = datetime.now(UTC)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._post_all, name="kubeflow-status", daemon=True)
        self._thread.start()

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Take over `metrics`, which contain "step" and, for a training step, "eta_s"."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        self._newest = {**self._newest, **numbers}  # a new mapping, because the thread may be reading the old one
        self._updated = datetime.now(UTC)

    def close(self) -> None:
        """Post the last status, and wait until all posts were sent or failed."""
        self._over.set()
        self._thread.join(2 * _POST_TIMEOUT_S)

    def _post_all(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._over.is_set()
            self._post(self._status(is_last))
            self._over.wait(_POST_INTERVAL_S)

    def _status(self, is_last: bool) -> dict[str, Any]:
        metrics = dict(self._newest)
        step, eta_s = metrics.pop("step"), metrics.pop("eta_s", None)
        progress = {"current_step": step, "total_steps": self.total_steps}
        # Only the last status of a complete run reports 100 %.
        is_complete = is_last and step >= self.total_steps
        left_s = {"estimatedRemainingSeconds": 0 if is_complete else max(0, int(eta_s or 0))}
        return {
            "lastUpdatedTime": self._updated.isoformat(),
            "progressPercentage": 100 if is_complete else int(min(99, step * 100 // max(1, self.total_steps))),
            "metrics": [{"name": name, "value": str(value)} for name, value in {**metrics, **progress}.items()],
            **(left_s if is_complete or eta_s is not None else {}),
        }

    def _post(self, status: dict[str, Any]) -> None:
        # A missing endpoint or token, or a refused connection, must not end the run.
        with suppress(OSError, ValueError, http.client.HTTPException):
            # Read the token for each post, because the kubelet renews the token.
            token = Path(self._token or "").read_text(encoding="utf-8").strip()
            context = ssl.create_default_context(cafile=self._ca_cert) if self._ca_cert else None
            request = urllib.request.Request(
                self._url,
                data=json.dumps({"trainerStatus": status}).encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                method="POST",
            )
            urllib.request.urlopen(request, timeout=_POST_TIMEOUT_S, context=context).close()


def kubeflow_status(total_steps: int, environ: Mapping[str, str] = os.environ) -> KubeflowStatus | None:
    """Return a reporter, or None if the controller did not ask for reports or the user disabled the integration."""
    disabled = environ.get(_DISABLED, "").lower() in ("true", "1", "yes")
    return KubeflowStatus(environ, total_steps) if environ.get(URL) and not disabled else None
