"""One rank of benchmarks/scale.py: train a tiny model, and count connections, threads, memory and CPU seconds.

The rank is a fork of a process that has imported torch, so that ranks share those pages. `HOST` in its environment
replaces the identity of its host, so that ranks of one machine exchange messages as ranks of several hosts do. The rank
does not measure the speed of its cores, because the matrices of hundreds of ranks would not fit into one machine.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

FIRST_STEP, LAST_STEP = 2, 3  # counters of connections are read when these steps begin
_TCP_INFO_BYTES = 232
_ESTABLISHED = 1
_PRESENT, _EXCLUSIVE = 1 << 63, 1 << 56  # bits of a page in /proc/PID/pagemap
_PIECE_PAGES = 4096
Pages = npt.NDArray[np.int64]


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
    from aliquot.distributed.collectives.wire import Wire
    from aliquot.distributed.liveness.watchdog import Activity
    from aliquot.distributed.rank_process import die_with_parent
    from aliquot.planner.compute_ceiling import Ceiling
    from aliquot.run import resolved_run, trainer

    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    peers.namespace_id = lambda kind: f"{host}:{kind}"  # type: ignore[attr-defined]
    enter = Activity.enter

    def enter_and_mark(activity: Activity, stage: str, saving: int | None = None) -> None:
        words, _, number = stage.rpartition(" step ")
        probe.mark(words or stage, int(number) if words else 0)
        enter(activity, stage, saving)

    send = Wire.send

    def count_and_send(wire: Wire, tensor: Tensor, host: int) -> Future[None]:
        probe.messages += 1
        return send(wire, tensor, host)

    Activity.enter = enter_and_mark  # type: ignore[method-assign, assignment]
    Wire.send = count_and_send  # type: ignore[method-assign, assignment]
    for module in (resolved_run, trainer):
        module.ceiling = lambda *_, **__: Ceiling(1e9, True)  # type: ignore[attr-defined]
    trainer.train(validate(values, {}, "scale"))


class Probe:
    """The counts of this process at the beginning of every stage of a run."""

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._inherited = np.concatenate([_runs(pages) for pages in _pages(_PRESENT)])
        self._marks: list[tuple[str, int, float]] = [("FORK", 0, time.process_time())]
        self._traffic: list[list[list[int]]] = []
        self.messages = 0  # sent to other hosts
        self._messages: list[int] = []
        self._sizes: dict[str, Any] = {}

    def mark(self, stage: str, step: int) -> None:
        """Record the CPU seconds of this process until now; at two steps, its connections and its memory as well."""
        self._marks.append((stage, step, time.process_time()))
        if stage == "in" and step in (FIRST_STEP, LAST_STEP):
            self._traffic.append(_connections())
            self._messages.append(self.messages)
            self._sizes = _sizes(self._inherited)

    def counts(self) -> dict[str, Any]:
        """Return all counts. Connections to the rendezvous store are counted apart."""
        self._marks.append(("END", 0, time.process_time()))
        to_store = [row for row in self._traffic[-1] if self._store_port in row[:2]] if self._traffic else []
        between = [[row for row in rows if self._store_port not in row[:2]] for rows in self._traffic]
        counts = {"marks": self._marks, "traffic": between, "messages": self._messages, "store": len(to_store)}
        return counts | self._sizes


def _sizes(inherited: Pages) -> dict[str, Any]:
    private = copied = 0
    starts, stops = inherited[:, 0], inherited[:, 1]
    for pages in _pages(_PRESENT | _EXCLUSIVE):
        private += len(pages)
        copied += int((pages < stops[np.searchsorted(starts, pages, "right") - 1]).sum())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "python_threads": sorted(thread.name for thread in threading.enumerate()),
        "private_bytes": private * mmap.PAGESIZE + _swapped_bytes(),
        "copied_bytes": copied * mmap.PAGESIZE,  # pages of the parent that this process has written to
    }


def _swapped_bytes() -> int:
    """Return the bytes of this process in swap space, which hundreds of ranks may need; shared pages count in part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("SwapPss")) << 10


def _pages(bits: int) -> Iterator[Pages]:
    """Yield the numbers of the pages of this process that have all `bits` in /proc/self/pagemap, in ascending order.

    The file is read in short pieces, because the buffers would count as memory of the rank.
    """
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, stop = (int(edge, 16) // mmap.PAGESIZE for edge in line.split()[0].split("-"))
            if "[v" in line:  # pages of the kernel
                continue
            for at in range(first, stop, _PIECE_PAGES):
                pagemap.seek(8 * at)
                entries = np.frombuffer(pagemap.read(8 * min(_PIECE_PAGES, stop - at)), np.uint64)
                pages = at + np.flatnonzero(entries & np.uint64(bits) == bits)
                if len(pages):
                    yield pages


def _runs(pages: Pages) -> Pages:
    """Return (first, stop) of the runs of ascending page numbers, which take less memory than the numbers."""
    ends = np.flatnonzero(np.diff(pages) != 1)
    return np.stack([pages[np.append(0, ends + 1)], pages[np.append(ends, -1)] + 1], 1)


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
