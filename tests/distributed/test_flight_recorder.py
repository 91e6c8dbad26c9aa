"""Collectives of NCCL that never end, with a recording of torch's flight recorder in the place of a GPU."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aliquot.distributed import flight_recorder, ranks
from aliquot.distributed.flight_recorder import (
    connecting_nccl,
    describe_pending,
    oldest_pending,
    record_collectives,
)
from aliquot.distributed.liveness import liveness, watchdog
from aliquot.distributed.rank_errors import RankError
from aliquot.distributed.topology import Topology

ON_GPU = Topology(1, 2, 1, 2, 0, 1, "cuda", 1, ())


def entry(number: int, name: str, age_s: float, group: int = 0) -> dict[str, Any]:
    """An entry as torch 2.13 writes it, without the keys that nobody reads."""
    return {
        "pg_id": group, "collective_seq_id": number, "profiling_name": f"nccl:{name}", "is_p2p": False,
        "time_created_ns": int((time.time() - age_s) * 1e9), "input_sizes": [[1024, 8]], "input_dtypes": ["BFloat16"],
    }  # fmt: skip


def record(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any], completed: int = -1) -> None:
    def dump(includeCollectives: bool = True, onlyActive: bool = False) -> bytes:
        status = {"0": {"last_completed_collective": str(completed)}}
        return json.dumps({"version": "2.10", "pg_status": status, "entries": list(entries)}).encode()

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)


def test_oldest_unfinished_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert oldest_pending() is None and describe_pending() == ""  # this torch has no NCCL
    record(monkeypatch, entry(7, "all_reduce", 90), completed=7)
    assert oldest_pending() is None
    entries = (entry(9, "_reduce_scatter_base", 20), entry(8, "_all_gather_base", 30), entry(7, "all_reduce", 90))
    record(monkeypatch, *entries, completed=7)
    assert describe_pending() == "; collective 8, nccl:_all_gather_base of BFloat16[1024, 8], has not ended for 30 s"


@pytest.mark.parametrize("age_s", [1700.0, 1801.0])
def test_run_ends_when_a_collective_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float) -> None:
    errors: SimpleQueue[RankError] = SimpleQueue()
    record(monkeypatch, entry(1, "_all_gather_base", age_s))
    monkeypatch.setattr(watchdog, "end_rank", errors.put)
    monkeypatch.setattr(liveness, "_NCCL_INTERVAL_S", 0.05)
    rank = watchdog.WatchedRank(ON_GPU, 1800.0, lambda: "building the model", tmp_path / "logs")
    with liveness.CollectiveWatchdog(rank):
        line = errors.get(timeout=20).message if age_s > 1800 else ""
        time.sleep(0.0 if line else 0.5)
    assert errors.empty() or line
    if line:
        assert line.startswith("collective 1, nccl:_all_gather_base of BFloat16[1024, 8], has not ended for 1801 s")
        assert "(launch.step_timeout_s) while building the model: is a rank missing" in line
        assert json.loads((tmp_path / "logs" / "collectives-rank-1.json").read_text())["entries"]


GPU_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE", "PYTORCH_ALLOC_CONF")


def test_nccl_gets_its_own_timeout_and_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo waits for days, NCCL for a step, from the first collective on. CUDA begins with the allocator's setting."""
    calls: list[tuple[str, timedelta]] = []
    at_cuda_start: list[str | None] = []

    class Backend:
        def _set_default_timeout(self, timeout: timedelta) -> None:
            calls.append(("nccl", timeout))

    class Group:
        def _get_backend(self, device: torch.device) -> Backend:
            assert device.type == "cuda"
            return Backend()

    def init_process_group(backend: str, *, timeout: timedelta, **_: object) -> None:
        calls.append((backend, timeout))

    for name in (*GPU_VARIABLES, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "choose_gpu", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: at_cuda_start.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(flight_recorder, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=Group())))
    threads = torch.get_num_threads()
    try:
        record_collectives(tmp_path)
        alone = Topology(0, 1, 0, 1, 0, 1, "cuda", threads, ())
        ranks.Ranks.join(alone, 30 * 24 * 3600.0, nccl_timeout_s=1800.0)
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/nccl-collectives-rank-"
        assert (os.environ["TORCH_FR_BUFFER_SIZE"], os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("2000", "1")
    finally:
        for name in GPU_VARIABLES:
            os.environ.pop(name, None)
    assert at_cuda_start == ["expandable_segments:True"]
    assert calls == [("cpu:gloo,cuda:nccl", timedelta(days=30)), ("nccl", timedelta(seconds=1860))]


@pytest.mark.parametrize("connects", [True, False])
def test_run_ends_if_nccl_does_not_connect_the_ranks(monkeypatch: pytest.MonkeyPatch, connects: bool) -> None:
    """torch records the first collective of a group only when its ranks are connected."""
    errors: SimpleQueue[RankError] = SimpleQueue()
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=0.2)))
    world = SimpleNamespace(_get_backend=lambda device: backend)
    stand_in = SimpleNamespace(group=SimpleNamespace(WORLD=world), get_world_size=lambda: 2, get_rank=lambda: 1)
    monkeypatch.setattr(flight_recorder, "dist", stand_in)
    monkeypatch.setattr(flight_recorder, "end_rank", errors.put)
    with connecting_nccl(torch.device("cuda")):
        message = "" if connects else errors.get(timeout=20).message
    time.sleep(0.5)
    assert errors.empty()
    assert connects or message.startswith("NCCL has not connected the 2 ranks for 0 s: does a firewall")
    with connecting_nccl(torch.device("cpu")):  # gloo has its own timeout
        assert errors.empty()
