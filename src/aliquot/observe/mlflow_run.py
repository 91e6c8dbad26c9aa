"""A run of MLflow. Server and experiment are those of its own variables (MLFLOW_TRACKING_URI, ...)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

# A server that does not answer is asked again by the process that follows the run; the client alone takes minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

_STATUS = {"end": "FINISHED", "failed": "FAILED"}
_MOST_PARAMETERS, _MOST_METRICS, _LONGEST = 100, 1000, 500  # that a call takes; characters of a value


class MlflowRun:
    def __init__(self, config: dict[str, Any], run_id: str | None) -> None:
        self._client = MlflowClient()
        if run_id is not None:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "aliquot")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        self.run_id = self._client.create_run(experiment, run_name=config["run"]["name"]).info.run_id
        parameters = [
            Param(f"{section}.{key}", str(value)[:_LONGEST])
            for section, values in config.items()
            for key, value in (values or {}).items()
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self.run_id, params=parameters[first : first + _MOST_PARAMETERS])

    def send(self, lines: list[dict[str, Any]]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            Metric(name, float(value), now, line["step"])
            for line in lines
            for name, value in line.items()
            if name != "step" and isinstance(value, int | float)
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.run_id, metrics[first : first + _MOST_METRICS])

    def attach(self, file: Path) -> None:
        self._client.log_artifact(self.run_id, str(file))

    def end(self, how: str | None) -> None:
        self._client.set_terminated(self.run_id, _STATUS.get(how or "", "KILLED"))
