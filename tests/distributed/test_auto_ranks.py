"""How many ranks a machine gets when nobody says: cores, NUMA nodes, quota, memory, batch and engine."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aliquot.config.schema import LaunchSection, RunConfig
from aliquot.distributed.auto_ranks import cpu_ranks, crowding_warning, max_cpu_ranks, resolve_auto_ranks
from aliquot.distributed.numa_binding import core_sets
from aliquot.distributed.topology import threads_per_rank
from aliquot.machine.cpu import CpuFacts
from tests.runs import command, write_config

GIB = 1 << 30


def machine(*nodes: int, quota: float | None = None) -> CpuFacts:
    """NUMA nodes of so many cores, two threads each."""
    count = sum(nodes)
    cores = tuple((core, core + count) for core in range(count))
    owners = tuple(node for node, size in enumerate(nodes) for _ in range(size))
    return CpuFacts("model", cores, quota, len(nodes), (), owners)


def config(engine: str = "auto", **train: Any) -> RunConfig:
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "shard": {"engine": engine}, "train": train}
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize(
    ("cpu", "gib", "settings", "nodes", "ranks"),
    [
        (machine(1), 64, config(global_batch_size=64), 1, 1),
        (machine(2), 64, config(global_batch_size=64), 1, 2),
        (machine(4), 64, config(global_batch_size=64), 1, 4),
        (machine(16), 64, config(global_batch_size=64), 1, 4),
        (machine(24, 24), 384, config(global_batch_size=96), 1, 12),
        (machine(24, 24), 384, config("host", global_batch_size=96), 1, 12),
        # Not more processes than memory holds, not more ranks than there are micro-batches.
        (machine(24, 24), 16, config(global_batch_size=96), 1, 8),
        (machine(4), 1, config(global_batch_size=64), 1, 1),
        (machine(24, 24), 384, config(global_batch_size=4), 1, 4),
        (machine(24, 24), 384, config(global_batch_size=32, per_device_train_batch_size=8), 1, 4),
        (machine(24, 24), 384, config(global_batch_size=32, gradient_accumulation_steps=8), 1, 4),
        (machine(24, 24), 384, config(global_batch_size=8), 2, 4),
        (machine(2), 64, config(global_batch_size=1), 1, 1),
        # An uneven last round costs more than threads do.
        (machine(24), 384, config(global_batch_size=8), 1, 4),
        # A quota is shared by all NUMA nodes.
        (machine(24, 24, quota=8), 384, config(global_batch_size=64), 1, 8),
        (machine(8, quota=0.5), 384, config(global_batch_size=64), 1, 1),
        # More ranks would train something else, or hold layers of their own.
        (machine(24, 24), 384, config(), 1, 2),
        (machine(8), 384, config(gradient_accumulation_steps=4), 1, 1),
        (machine(24, 24), 384, config("fsdp", global_batch_size=64), 1, 2),
    ],
)
def test_ranks(cpu: CpuFacts, gib: int, settings: RunConfig, nodes: int, ranks: int) -> None:
    found, reason = cpu_ranks(settings, nodes, cpu, gib * GIB)
    assert found == ranks, reason


@example(nodes=[1, 1, 8], batch=1, gib=1, quota=9.0)
@given(
    nodes=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    batch=st.integers(1, 300),
    gib=st.integers(1, 400),
    quota=st.none() | st.floats(0.1, 100),
)
def test_cpu_ranks_never_span_nodes_or_share_cores(nodes: list[int], batch: int, gib: int, quota: float | None) -> None:
    cpu = machine(*nodes, quota=quota)
    ranks, _ = cpu_ranks(config(global_batch_size=batch), 1, cpu, gib * GIB)
    threads, _ = threads_per_rank(LaunchSection(), {}, cpu, ranks)
    assert 1 <= ranks <= max(len(nodes), max_cpu_ranks(cpu, gib * GIB)[0])
    assert ranks * threads <= cpu.usable_cores
    node_of = {number: node for core, node in zip(cpu.cores, cpu.node_of_core, strict=True) for number in core}
    sets = core_sets(cpu, ranks, threads)
    if ranks >= len(nodes) and ranks > 1:
        assert all(len({node_of[number] for number in own}) <= 1 for own in sets)
        assert all(len(own) >= threads for own in sets) or not any(sets)
    if ranks > 1 and len(nodes) > 1 and ranks >= len(nodes):
        assert {node_of[own[0]] for own in sets} == set(range(len(nodes)))  # no node is idle


def test_configured_number_of_ranks_is_kept() -> None:
    assert resolve_auto_ranks(LaunchSection(ranks=7), config()) == (LaunchSection(ranks=7), None)
    launch, reason = resolve_auto_ranks(LaunchSection(device="cpu"), config())
    assert isinstance(launch.ranks, int) and reason


def test_crowding_warning_counts_ranks_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a person asks for are started all the same."""
    monkeypatch.setattr("aliquot.distributed.auto_ranks.read_cpu", lambda: machine(2))
    monkeypatch.setattr("aliquot.distributed.auto_ranks.memory_limit", lambda: 24 * GIB)
    settings = config(global_batch_size=64)
    for launch in (LaunchSection(), LaunchSection(ranks=4, device="cpu")):
        assert crowding_warning(launch, settings) is None
    assert crowding_warning(LaunchSection(ranks=64, device="cpu"), settings) == (
        "launch.ranks is 64, but this machine has 2 cores and 24 GiB of memory: ranks on one core take turns, and"
        " these ranks take about 128 GiB. launch.ranks: auto would start 2 here"
    )


def test_crowding_warning_precedes_ranks(tmp_path: Path) -> None:
    """No rank starts here, because the other node never comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nodes = ["launch.nodes=2", "launch.node_rank=0", "launch.join_timeout_s=0.1", f"launch.master_port={port}"]
    ranks = 4 * len(os.sched_getaffinity(0))
    result = command("train", write_config(tmp_path), *nodes, f"launch.ranks={ranks}")
    first, *_, last = result.stderr.splitlines()
    assert first.startswith(f"aliquot: launch.ranks is {ranks}, but this machine has "), result.stderr
    assert last.endswith("[rendezvous]")
