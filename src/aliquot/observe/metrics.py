"""Write the metrics of each logged step to metrics.jsonl, TensorBoard, Prometheus, Kubeflow, W&B and MLflow."""

from __future__ import annotations

import io
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from aliquot.config.schema import ObserveSection
from aliquot.core.decode import read_json_lines
from aliquot.core.errors import LaunchError, writing
from aliquot.core.small_files import flush_to_disk, open_unlinked, publish_bytes
from aliquot.observe.dashboards import Dashboard, KubeflowStatus
from aliquot.observe.run_directory import RunDirectory

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge


class MetricsFile:
    """Appends to metrics.jsonl line by line, so that other programs can follow the file during the run."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Open the file. First remove lines after `resumed_step` and a truncated last line, so that no step repeats.

        A run that starts at step 0 removes all lines, because it repeats the evaluation before the first step.
        """
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                lines = [
                    line
                    for line, fields in (read_json_lines(path) if resumed_step else ())
                    if line.endswith(b"\n") and isinstance(fields.get("step"), int) and fields["step"] <= resumed_step
                ]
                publish_bytes(path, b"".join(lines))
            self._file = open_unlinked(path, "a", encoding="utf-8")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append `metrics`, which contain "step"."""
        with writing(self._path):
            self._file.write(json.dumps(finite(metrics), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self._path), self._file:
            flush_to_disk(self._file)


class TensorBoard:
    """Writes numeric metrics as TensorBoard scalars, in one file per attempt.

    This class replaces the writer of tensorboard, whose thread ends with a traceback on a full disk.
    """

    def __init__(self, directory: Path, resumed_step: int = 0) -> None:
        """Open a new event file, which hides the steps of earlier attempts after `resumed_step`."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._directory, self._end = directory, 0
        events = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if resumed_step:
            start = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            self._file = open_unlinked(directory / name, "ab", buffering=0)
        self._append(events)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append a step. Raises UserError if the disk is full; later calls may succeed."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._append([Event(wall_time=time.time(), step=metrics["step"], summary=Summary(value=values))])

    def close(self) -> None:
        with writing(self._directory):
            self._file.close()

    def _append(self, events: list[Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = io.BytesIO()
        for event in events:
            RecordWriter(records).write(event.SerializeToString())
        rest = memoryview(records.getvalue())
        size = len(rest)
        with writing(self._directory):
            try:
                while len(rest):
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(self._end)  # readers never continue after a truncated record
                raise
        self._end += size


class Exporter:
    """Serves metrics to Prometheus at http://HOST:PORT/metrics, as gauges `aliquot_<name>` with the label `run`.

    A list with a number per rank (`memory_bytes`) also has the label `rank`. `listen` opens the port
    `observe.prometheus`.
    """

    def __init__(self, observe: ObserveSection, run: str) -> None:
        self._port = observe.prometheus
        self._host = observe.prometheus_host
        self._run = run
        self._gauges: dict[str, Gauge] = {}
        self._names: set[str] = set()
        self._registry: CollectorRegistry | None = None
        self._server: tuple[WSGIServer, Thread] | None = None

    def listen(self) -> None:
        """Open the port if the config sets one. Raises UserError if another process uses the port."""
        if self._port is None:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        try:
            self._server = start_http_server(self._port, self._host, self._registry)
        except OSError as error:
            raise LaunchError(
                f"observe.prometheus: cannot listen on {self._host}:{self._port}: {error.strerror}; choose another"
                " port, or null for none"
            ) from None

    def write(self, metrics: Mapping[str, Any]) -> None:
        if self._registry is None:
            return
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._gauge(name, "run").labels(self._run).set(value)
            elif isinstance(value, list) and all(isinstance(item, int | float) for item in value):
                for rank, item in enumerate(value):
                    self._gauge(name, "run", "rank").labels(self._run, str(rank)).set(item)

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = self._registry = None

    def _gauge(self, name: str, *labels: str) -> Gauge:
        from prometheus_client import Gauge

        if name not in self._gauges:
            text = f"`{name}` of the last line of metrics.jsonl that has it"
            plain = re.sub(r"\W", "_", f"aliquot_{name}", flags=re.ASCII)  # a data source may be called tiny-stories
            numbered = (f"{plain}_{number}" for number in count(2))  # and another source tiny_stories
            metric = next(candidate for candidate in chain([plain], numbered) if candidate not in self._names)
            self._names.add(metric)
            self._gauges[name] = Gauge(metric, text, labels, registry=self._registry)
        return self._gauges[name]


Writer = MetricsFile | TensorBoard | Dashboard | Exporter | KubeflowStatus


def writers(
    directory: RunDirectory, resumed_step: int, report_to: Sequence[str], warn: Callable[[str], None]
) -> list[Writer]:
    """Return the writers of metrics.jsonl and of the services `report_to`. `warn` receives errors of dashboards."""
    return [
        MetricsFile(directory.metrics, resumed_step),
        *(
            TensorBoard(directory.tensorboard, resumed_step)
            if service == "tensorboard"
            else Dashboard(service, directory.metrics, warn)
            for service in dict.fromkeys(report_to)
        ),
    ]


def last_point(path: Path, name: str, until: float = math.inf) -> tuple[int, float | None]:
    """Return the step and the value of the newest number `name` in a metrics.jsonl, to which a run may be writing.

    Later steps than `until` do not count. Return (0, None) if there is none.
    """
    with suppress(OSError):
        for _, fields in read_json_lines(path, backwards=True):
            step, value = fields.get("step"), fields.get(name)
            if isinstance(step, int) and step <= until and isinstance(value, int | float):
                return step, value
    return 0, None


def finite(value: Any) -> Any:
    """Replace infinite numbers and NaN in `value` by None, because JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
