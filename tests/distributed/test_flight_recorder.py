"""Collectives of NCCL that never end, with a recording of torch's flight recorder in the place of a GPU."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from aliquot.distributed import flight_recorder, ranks
from aliquot.distributed.flight_recorder import connecting_nccl, describe_pending, record_collectives
from aliquot.distributed.rank_errors import RankError
from aliquot.distributed.signed_store import SignedStore
from aliquot.distributed.topology import Topology


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
    assert describe_pending() == ""  # this torch has no NCCL
    record(monkeypatch, entry(7, "all_reduce", 90), completed=7)
    assert describe_pending() == ""
    entries = (entry(9, "_reduce_scatter_base", 20), entry(8, "_all_gather_base", 30), entry(7, "all_reduce", 90))
    record(monkeypatch, *entries, completed=7)
    assert describe_pending() == "; collective 8, nccl:_all_gather_base of BFloat16[1024, 8], has not ended for 30 s"


GPU_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_nccl_gets_its_own_timeouts_and_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """gloo waits for days, NCCL for a step, from the exchange of its id on. gloo takes the place of NCCL here."""
    begin = dist.init_process_group
    stores: list[Store] = []

    def init_process_group(backend: str, *, store: Store, **options: Any) -> None:
        assert backend == "cpu:gloo,cuda:nccl" and options["timeout"] == timedelta(days=30)
        stores.append(store)
        begin("cpu:gloo,cuda:gloo", store=HashStore(), rank=0, world_size=1)

    for name in (*GPU_VARIABLES, "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restored at the end
    monkeypatch.setattr(ranks, "choose_gpu", lambda *_: 0)
    monkeypatch.setattr(ranks, "meet_ranks", lambda *_: SignedStore(PrefixStore("run", HashStore()), "secret", "id"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    before, threads = dist.get_debug_level(), torch.get_num_threads()
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    try:
        record_collectives(tmp_path)
        first = Topology(0, 2, 0, 2, 0, 1, "cuda", threads, ())
        ranks.Ranks.join(first, 30 * 24 * 3600.0, nccl_timeout_s=1800.0)
        world: Any = dist.group.WORLD
        nccl = world._get_backend(torch.device("cuda"))
        assert nccl.options._timeout == timedelta(seconds=1860)
        assert type(nccl).__name__.endswith("Wrapper") == (level == "DETAIL")
    finally:
        dist.set_debug_level(before)
        dist.destroy_process_group()
    assert cast("Any", stores[0]).timeout == timedelta(seconds=1800)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/nccl-collectives-rank-"
    assert (os.environ["TORCH_FR_BUFFER_SIZE"], os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("2000", "1")


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
