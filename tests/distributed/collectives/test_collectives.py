"""Real processes: sums through shared memory, deaths, hosts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.processes import run_ranks
from tests.tools import warm

WORKER = Path(__file__).parent / "worker.py"


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(5, marks=pytest.mark.long)])
def test_ring_sums_random_pieces_in_order(tmp_path: Path, world_size: int) -> None:
    run_ranks(WORKER, world_size, tmp_path, "sums")


def test_two_runs_at_once_on_one_host(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    runs = []
    for folder in folders:
        folder.mkdir()
        asked = json.dumps([(2, str(folder), ["sums"])])
        runs.append(
            warm.popen("-m", "tests.distributed.collectives.worker", asked, cwd=warm.REPOSITORY, stderr=subprocess.PIPE)
        )
    for run in runs:
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors


def test_a_killed_rank_is_noticed_by_all(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):  # the killed rank's status
        run_ranks(WORKER, 3, tmp_path, "killed", timeout_s=60)
    for rank in (0, 1):
        assert "has ended" in (tmp_path / f"lost-{rank}").read_text()


def test_a_killed_host_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):  # the killed rank's status
        run_ranks(WORKER, 2, tmp_path, "killed_host", timeout_s=60)
    assert (tmp_path / "lost-0").read_text() == "rank 1 has ended on another host, rank 0 waits for it in vain"


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_hosts_exchange_their_shards(tmp_path: Path, world_size: int) -> None:
    run_ranks(WORKER, world_size, tmp_path, "hosts")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_memory_per_numa_node(tmp_path: Path, world_size: int) -> None:
    run_ranks(WORKER, world_size, tmp_path, "numa")
