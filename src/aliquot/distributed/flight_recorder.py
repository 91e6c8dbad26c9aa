"""Collectives of NCCL that never end: limit them, and name them from torch's flight recorder.

A rank that waits for NCCL spins in the driver, so that it looks busy. torch's own watchdog ends a process whose
collective is unfinished for a little longer than `launch.step_timeout_s`, and first writes the flight recorder: the
collectives that the process has enqueued. The watchdog of steps (liveness/liveness.py), which acts before, names the
oldest of them.

Within the first collective of a group, NCCL connects its ranks. If it cannot, it waits for ever, and torch has recorded
nothing yet: `connecting_nccl` ends the run then.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aliquot.distributed.rank_errors import RankError, bounded_value, end_rank

_ENTRIES = "2000"  # collectives that the recorder keeps
_LATER_S = 60.0  # torch ends the process this much later than the watchdog of steps, which names the collective


def record_collectives(directory: Path | None) -> None:
    """Switch on torch's flight recorder, before the process group exists. Settings of the user stay.

    `directory`: where NCCL writes its record before it aborts a process; None: at torch's default place.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if directory is not None:
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(directory.absolute() / "nccl-collectives-rank-"))


def limit_nccl(timeout_s: float) -> None:
    """Let NCCL abort this process if a collective takes longer than `timeout_s` and a little more.

    `init_process_group` has only one timeout for gloo and NCCL.
    """
    group: Any = dist.group.WORLD
    group._get_backend(torch.device("cuda")).set_timeout(timedelta(seconds=timeout_s + _LATER_S))


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


def _oldest_pending() -> str:
    """Describe the unfinished NCCL collective of this process that was enqueued first; an empty text without NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)  # only in torch with CUDA
    if dump is None:
        return ""
    record = json.loads(dump(includeCollectives=True, onlyActive=True))
    # The recorder never learns the end of a collective that belongs to a coalesced one, but it counts the ends.
    completed = {group: int(status["last_completed_collective"]) for group, status in record["pg_status"].items()}
    pending = [
        entry
        for entry in record.get("entries", [])
        if not entry["is_p2p"] and entry["collective_seq_id"] > completed.get(str(entry["pg_id"]), -1)
    ]
    if not pending:
        return ""
    first = min(pending, key=lambda entry: entry["time_created_ns"])
    inputs = zip(first["input_dtypes"], first["input_sizes"], strict=False)
    texts = ", ".join(f"{dtype}{size}" for dtype, size in inputs)
    age_s = time.time() - first["time_created_ns"] / 1e9
    name = f"collective {first['collective_seq_id']}, {first['profiling_name']}"
    return f"; {name} of {texts}, has not ended for {age_s:.0f} s"


def describe_pending() -> str:
    """Return text for an error line about a hang: the collective that this rank waits for, or an empty text."""
    return bounded_value(_oldest_pending, "")
