"""The curve of a run: one JSON object a logged step in metrics.jsonl, and the same numbers for dashboards."""

from __future__ import annotations

import io
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from aliquot.config.schema import ObserveSection
from aliquot.core.errors import StorageError, writing
from aliquot.core.small_files import open_unlinked, publish_text
from aliquot.observe.dashboards import Dashboard
from aliquot.observe.kubeflow import KubeflowStatus
from aliquot.observe.prometheus import Exporter


class MetricsFile:
    """Appends to metrics.jsonl, a line at a time, so that it can be followed while the run goes on."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Lines beyond `resumed_step`, and a last one that was cut short, are dropped first: one clean curve.

        From step 0 a run begins anew, with its evaluation before the first step.
        """
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                publish_text(path, "".join(_lines_until(path, resumed_step) if resumed_step else []))
            self._file = open_unlinked(path, "a", encoding="utf-8")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """`metrics` holds "step". Numbers that are not finite become null: JSON has none."""
        with writing(self._path):
            self._file.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self._path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


class TensorBoard:
    """The numbers among the metrics, in a file of their own an attempt."""

    def __init__(self, directory: Path, resumed_step: int = 0) -> None:
        """What earlier attempts have written beyond `resumed_step` is not shown."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._directory, self._end = directory, 0
        begun = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if resumed_step:
            start = SessionLog(status=SessionLog.START)
            begun.append(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            self._file = open_unlinked(directory / name, "ab", buffering=0)
        self._append(begun)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Raises UserError where the disk takes no more; what comes later is written where it does again."""
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
        rest = records.getbuffer()
        size = len(rest)
        with writing(self._directory):
            try:
                while len(rest):
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(self._end)  # a reader stops for good at half a record
                raise
        self._end += size


class Curve:
    """All writers that the configuration asks for, on the rank that writes; elsewhere nothing."""

    def __init__(
        self,
        metrics: Path,
        tensorboard: Path,
        observe: ObserveSection,
        resumed_step: int,
        enabled: bool,
        exporter: Exporter | None = None,
        status: KubeflowStatus | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`warn`: of a dashboard that does not take what it is sent."""
        self._writers: list[MetricsFile | TensorBoard | Dashboard | Exporter | KubeflowStatus] = []
        if enabled:
            self._writers.append(MetricsFile(metrics, resumed_step))
            self._writers += [writer for writer in (exporter, status) if writer is not None]
            for service in dict.fromkeys(observe.report_to):
                if service == "tensorboard":
                    self._writers.append(TensorBoard(tensorboard, resumed_step))
                else:
                    self._writers.append(Dashboard(service, metrics, warn))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Raises UserError where a disk is full, once all writers have been given them: not all write to a disk."""
        _all([partial(writer.write, metrics) for writer in self._writers])

    def close(self) -> None:
        """Raises as `write` does."""
        _all([writer.close for writer in self._writers])


def _all(calls: Sequence[Callable[[], None]]) -> None:
    failures = []
    for call in calls:
        try:
            call()
        except StorageError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def last_step(path: Path) -> int:
    """Of a metrics.jsonl, which may be growing; 0: of none."""
    with suppress(OSError):
        for line in reversed(path.read_text(encoding="utf-8").splitlines()):
            with suppress(ValueError):  # cut short
                return int(json.loads(line)["step"])
    return 0


def _lines_until(path: Path, step: int) -> list[str]:
    kept = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                metrics = json.loads(line)
            except json.JSONDecodeError:  # cut short when the run was killed
                continue
            if line.endswith("\n") and metrics["step"] <= step:
                kept.append(line)
    return kept


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
