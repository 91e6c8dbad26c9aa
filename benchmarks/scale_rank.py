"""One rank of benchmarks/scale.py: train a tiny model, and count connections, threads, memory and CPU seconds.

The rank is a fork of a process that has imported torch, so that ranks share those pages. `HOST` in its environment
replaces the identity of its host, so that ranks of one machine exchange messages as ranks of several hosts do.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

FIRST_STEP, LAST_STEP = 2, 4  # counters of connections are read when these steps begin
_TCP_INFO_BYTES = 232
_ESTABLISHED = 1


def run(environ: Mapping[str, str], values: dict[str, Any], result: Path) -> NoReturn:
    """Train in this forked process as one rank, write its counts to `result`, and end the process."""
    code = 1
    try:
        log = os.open(result.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.environ.update(environ)
        probe = Probe(int(environ["MASTER_PORT"]))
        _train(values, environ["HOST"], probe)
        result.write_text(json.dumps(probe.counts()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _train(values: dict[str, Any], host: str, probe: Probe) -> None:
    import torch

    from aliquot.config.read_config import validate
    from aliquot.distributed.collectives import peers
    from aliquot.run.run_context import Activity, Stage
    from aliquot.run.train import train

    torch.set_num_threads(1)
    peers.namespace_id = lambda kind: f"{host}:{kind}"  # type: ignore[attr-defined]
    enter = Activity.enter

    def enter_and_mark(activity: Activity, stage: Stage, step: int = 0, saving: int | None = None) -> None:
        probe.mark(stage.name, step)
        enter(activity, stage, step, saving)

    Activity.enter = enter_and_mark  # type: ignore[method-assign, assignment]
    train(validate(values, {}, "scale"))


class Probe:
    """The counts of this process at the beginning of every stage of a run."""

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._marks: list[tuple[str, int, float]] = [("FORK", 0, time.process_time())]
        self._traffic: list[list[list[int]]] = []
        self._sizes: dict[str, Any] = {}

    def mark(self, stage: str, step: int) -> None:
        """Record the CPU seconds of this process until now; at two steps, its connections and its memory as well."""
        self._marks.append((stage, step, time.process_time()))
        if stage == "STEP" and step in (FIRST_STEP, LAST_STEP):
            self._traffic.append(_connections())
            self._sizes = _sizes()

    def counts(self) -> dict[str, Any]:
        """Return all counts. Connections to the rendezvous store are counted apart."""
        self._marks.append(("END", 0, time.process_time()))
        to_store = [row for row in self._traffic[-1] if self._store_port in row[:2]] if self._traffic else []
        between = [[row for row in rows if self._store_port not in row[:2]] for rows in self._traffic]
        return {"marks": self._marks, "traffic": between, "store": len(to_store), **self._sizes}


def _sizes() -> dict[str, Any]:
    fields = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    private = sum(int(line[1]) for line in fields if line[0] in ("Private_Clean:", "Private_Dirty:"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "python_threads": sorted(thread.name for thread in threading.enumerate()),
        "private_bytes": private << 10,
    }


def _connections() -> list[list[int]]:
    """Return (local port, remote port, bytes sent, bytes received, segments sent) of every TCP connection."""
    rows = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            descriptor = os.dup(int(name))
        except OSError:  # of the directory that was just listed
            continue
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if info[0] != _ESTABLISHED:
                continue
            # Offsets of struct tcp_info in linux/tcp.h: bytes_received, data_segs_out, bytes_sent.
            received, segments, sent = (struct.unpack_from(kind, info, at)[0] for kind, at in _FIELDS)
            rows.append([connection.getsockname()[1], connection.getpeername()[1], sent, received, segments])
    return rows


_FIELDS = (("Q", 128), ("I", 156), ("Q", 200))
