"""Runs of W&B and MLflow. Server, project and keys come from the variables of each client (WANDB_PROJECT, ...)."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

_STATUS = {"end": "FINISHED", "failed": "FAILED"}
_MAX_PARAMETERS, _MAX_METRICS, _MAX_VALUE = 100, 1000, 500  # per call; characters of a value


class Service(Protocol):
    """A run of a dashboard. Every method may raise whatever its client does."""

    run_id: str

    def send(self, lines: list[dict[str, Any]]) -> None:
        """Send `lines` of metrics.jsonl, in order."""
        ...

    def attach(self, file: Path) -> None:
        """Attach a file to the run; it replaces an older file of its name."""
        ...

    def end(self, how: str | None) -> None:
        """End the run of the service with the final event: end, stopped or failed; None: the run was killed."""
        ...


class WandbRun:
    def __init__(
        self, directory: Path, config: dict[str, Any], run_id: str | None, complain: Callable[[str], None]
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
        for line in lines:
            self._run.log({name: value for name, value in line.items() if isinstance(value, int | float)})

    def attach(self, file: Path) -> None:
        copied = Path(self._run.dir) / file.name  # W&B would link to the original, which may be removed
        copied.write_bytes(file.read_bytes())
        self._run.save(str(copied), base_path=self._run.dir, policy="now")

    def end(self, how: str | None) -> None:
        self._run.finish(exit_code=0 if how == "end" else 1)


class MlflowRun:
    def __init__(self, config: dict[str, Any], run_id: str | None) -> None:
        # The client reads these variables when it is imported. The process that follows the run repeats a failed call;
        # the client alone would repeat it for minutes.
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
        self._client.set_terminated(self.run_id, _STATUS.get(how or "", "KILLED"))
