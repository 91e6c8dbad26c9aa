"""Collectives of NCCL that never end: find them in torch's flight recorder, name them, and end the run.

A rank that waits for NCCL spins in the driver, so that it looks busy to the idle watchdog. torch's flight recorder
lists the collectives that this process has enqueued. The watchdog here ends the run if one of them is unfinished for
`launch.step_timeout_s`. NCCL's own timeout is a little longer, for the case that Python does not run.

Within the first collective of a group, NCCL connects its ranks. If it cannot, it waits for ever, and torch has recorded
nothing yet: `connecting_nccl` ends the run then.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from aliquot.core.small_files import publish_text
from aliquot.distributed.rank_errors import RankError, bounded_call, bounded_value, end_rank
from aliquot.distributed.topology import Topology

_ENTRIES = "2000"  # collectives that the recorder keeps
_FILE = "collectives-rank-"
_LATER_S = 60.0  # NCCL aborts the process this much later than the watchdog, which names the collective
_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Collective:
    """A collective that this rank has enqueued and that has not ended."""

    name: str  # as torch records it, for example `nccl:_all_gather_base`
    number: int  # of the collective in its group of ranks
    sizes: tuple[tuple[int, ...], ...]  # of its inputs
    dtypes: tuple[str, ...]
    age_s: float  # since it was enqueued

    def __str__(self) -> str:
        inputs = ", ".join(f"{dtype}{list(size)}" for dtype, size in zip(self.dtypes, self.sizes, strict=False))
        return f"collective {self.number}, {self.name} of {inputs},"


def record_collectives(directory: Path | None) -> None:
    """Switch on torch's flight recorder, before the process group exists. Settings of the user stay.

    `directory`: where NCCL writes its record before it aborts a process; None: at torch's default place.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if directory is not None:
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(directory.absolute() / f"nccl-{_FILE}"))


def limit_nccl(timeout_s: float) -> None:
    """Let NCCL abort this process if a collective takes longer than `timeout_s` and a little more.

    `init_process_group` has only one timeout for gloo and NCCL.
    """
    group: Any = dist.group.WORLD
    nccl = group._get_backend(torch.device("cuda"))
    nccl._set_default_timeout(timedelta(seconds=timeout_s + _LATER_S))


@contextmanager
def connecting_nccl(device: torch.device) -> Iterator[None]:
    """End this process if the block, with the first collectives of a group, takes longer than NCCL's timeout."""
    if device.type != "cuda" or dist.get_world_size() == 1:
        yield
        return
    group: Any = dist.group.WORLD
    timeout_s = group._get_backend(device).options._timeout.total_seconds()
    timer = threading.Timer(timeout_s, _end_unconnected, [timeout_s])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_unconnected(timeout_s: float) -> None:
    message = (
        f"NCCL has not connected the {dist.get_world_size()} ranks for {timeout_s:.0f} s: does a firewall or security"
        " group block traffic between the nodes? NCCL_DEBUG=INFO shows what each rank waits for [hung]"
    )
    end_rank(RankError(dist.get_rank(), "training", message, f"{message}\n", time.time()))


def oldest_pending() -> Collective | None:
    """Return the unfinished NCCL collective of this process that was enqueued first; None without NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)  # only in torch with CUDA
    if dump is None:
        return None
    record = json.loads(dump(includeCollectives=True, onlyActive=True))
    # The recorder never learns the end of a collective that belongs to a coalesced one, but it counts the ends.
    completed = {group: int(status["last_completed_collective"]) for group, status in record["pg_status"].items()}
    pending = [
        entry
        for entry in record.get("entries", [])
        if not entry["is_p2p"] and entry["collective_seq_id"] > completed.get(str(entry["pg_id"]), -1)
    ]
    if not pending:
        return None
    first = min(pending, key=lambda entry: entry["time_created_ns"])
    return Collective(
        first["profiling_name"],
        first["collective_seq_id"],
        tuple(tuple(size) for size in first["input_sizes"]),
        tuple(first["input_dtypes"]),
        time.time() - first["time_created_ns"] / 1e9,
    )


def describe_pending() -> str:
    """Return text for an error line about a hang: the collective that this rank waits for, or an empty text."""
    pending = bounded_value(oldest_pending, None)
    return "" if pending is None else f"; {pending} has not ended for {pending.age_s:.0f} s"


class CollectiveWatchdog:
    """A context manager of every rank that ends the run when a collective of NCCL does not end within `timeout_s`."""

    def __init__(
        self, topology: Topology, timeout_s: float, directory: Path | None, activity: Callable[[], str]
    ) -> None:
        """`directory`: for a file with the unfinished collectives; `activity` returns what this rank is doing."""
        self._rank, self._is_needed = topology.rank, topology.device == "cuda" and topology.world_size > 1
        self._timeout_s = timeout_s
        self._file = None if directory is None else directory / f"{_FILE}{topology.rank}.json"
        self._activity = activity
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        if self._is_needed:
            threading.Thread(target=self._run, name="aliquot-collective-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(min(_INTERVAL_S, self._timeout_s / 10)):
            hung = oldest_pending()
            if hung is not None and hung.age_s > self._timeout_s and not self._is_over.is_set():
                self._end(hung)

    def _end(self, hung: Collective) -> None:
        place = ""
        if (file := self._file) is not None and bounded_call(partial(self._write, file)):
            place = f"; the collectives of every rank: {file.with_name(f'{_FILE}*.json')}"
        message = (
            f"{hung} has not ended for {hung.age_s:.0f} s (launch.step_timeout_s) while {self._activity()}: is a rank"
            f" missing, or does a firewall or security group block NCCL?{place} [hung]"
        )
        end_rank(RankError(self._rank, "training", message, f"{message}\n", time.time()))

    @staticmethod
    def _write(file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        publish_text(file, torch._C._distributed_c10d._dump_nccl_trace_json().decode())  # type: ignore[attr-defined]
