"""Metrics as scalars of TensorBoard, a step appended at a time. Of tensorboard's own writers a thread does that, which
dies with a traceback where a disk is full."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aliquot.core.errors import writing
from aliquot.core.small_files import open_unlinked


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
