"""Proposed settings: pasted after the config, they give the planned run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from aliquot.cli.main import app
from aliquot.config.read_config import read_config
from aliquot.core.errors import EngineError
from aliquot.data.workload import Workload, batch_size
from aliquot.distributed.topology import RankLayout
from aliquot.planner import fit_check
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from aliquot.planner.settings_search import Search
from tests.conftest import REPOSITORY
from tests.planner.shapes import LLAMA, planned_config, search_on

GPU_RUN = REPOSITORY / "examples" / "llama3-8b-gpu.yaml"
SERVER = Machine.from_numbers(64, 4, 10)
SMALL = LLAMA | {"num_hidden_layers": 1}
BATCHES = [
    {"per_device_train_batch_size": 4},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    {"global_batch_size": 16, "gradient_accumulation_steps": 4},
    {"global_batch_size": 16, "per_device_train_batch_size": 2},
]


@pytest.mark.parametrize(
    "batch",
    [BATCHES[1], *(pytest.param(batch, marks=pytest.mark.long) for batch in BATCHES if batch != BATCHES[1])],
    ids=str,
)
def test_proposed_lines_give_the_planned_batch(tmp_path: Path, batch: dict[str, int]) -> None:
    file = tmp_path / "run.yaml"
    sections: dict[str, Any] = {
        "model": {"config": SMALL},
        "data": {"path": "stdlib", "sequence_length": 64},
        "train": {"max_steps": 1, "precision": "bf16", **batch},
        "launch": {"ranks": 2, "device": "cpu"},
    }
    file.write_text(yaml.safe_dump(sections))
    config = read_config(file)
    total = batch_size(config.train, 2).total
    planner = Planner(PlannedModel(config), SERVER)
    found = list(Search(planner, config, RankLayout(1, 2, 2, "cpu"), Workload.assumed(config)).candidates())
    assert {"(as it is)"} < {each.arguments for each in found} and len(found) > 10
    for each in found:
        pasted = read_config(file, [f"{key}={value}" for key, value in each.changes.items()])
        ranks = each.plan.nodes * each.plan.ranks_per_node
        assert (pasted.launch.nodes, pasted.launch.ranks) == (each.plan.nodes, each.plan.ranks_per_node)
        assert batch_size(pasted.train, ranks).total == total, each.arguments
        assert planner.engine(pasted, RankLayout(1, ranks, 1, "cpu")) == each.plan.engine, each.arguments
        again = planner.plan(
            pasted, RankLayout(each.plan.nodes, each.plan.ranks_per_node, 2, "cpu"), Workload.assumed(config)
        )
        assert again.peak_bytes_per_rank == pytest.approx(each.plan.peak_bytes_per_rank, rel=0.1), each.arguments


def test_proposed_arguments_keep_the_planned_ranks(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    sections = {
        "model": {"config": SMALL},
        "data": {"path": "stdlib", "sequence_length": 64},
        "train": {"max_steps": 1, "precision": "bf16", "global_batch_size": 16},
        "launch": {"device": "cpu"},
    }
    file.write_text(yaml.safe_dump(sections))
    config, machine = read_config(file), Machine.from_numbers(64, 16, 10)
    found = list(search_on(machine, config, machine.layout(config, 2)).candidates([2]))
    assert "(as it is)" in {each.arguments for each in found} and len({each.plan.ranks_per_node for each in found}) > 3
    for each in found:
        pasted = read_config(file, [f"{key}={value}" for key, value in each.changes.items()])
        assert machine.layout(pasted, 2) == each.layout, each.arguments


def test_fastest_sorts_by_time_on_as_many_nodes() -> None:
    config = planned_config(SMALL)
    search = search_on(SERVER, config, RankLayout(2, 2, 2, "cpu"))
    found = search.fastest()
    times = [each.plan.step_s for each in found]
    assert len(found) > 2 and times == sorted(times) and {each.plan.nodes for each in found} == {2}
    every = list(search.candidates())
    assert {each.plan.nodes for each in every} == {1, 2, 4}
    on_two = min(each.plan.step_s for each in every if each.plan.nodes == 2 and each.plan.fits)
    assert times[0] == pytest.approx(on_two, rel=0.03)


@pytest.mark.parametrize(
    "sections",
    [
        {"shard": {"engine": "fsdp"}, "train": {"optimizer_states": "int8"}},
        {"shard": {"engine": "host", "collectives": "gloo"}},
        {"shard": {"engine": "fsdp", "offload": "cpu"}},
    ],
    ids=str,
)
def test_plan_refuses_settings_that_train_refuses(sections: dict[str, Any]) -> None:
    config = planned_config(SMALL, **sections)
    with pytest.raises(EngineError):
        Planner(PlannedModel(config), SERVER).plan(config, RankLayout(1, 2, 2, "cpu"), Workload.assumed(config))


def test_what_is_proposed_has_room_in_shm() -> None:
    """Of two GPUs whose ranks need more of /dev/shm than there is, only an engine without NCCL fits."""
    config = planned_config(SMALL, launch={"ranks": 2, "device": "cuda"}, shard={"engine": "fsdp"})
    machine = replace(Machine.from_numbers(64, 4, 10), gpus=2, gpu_memory_bytes=80 << 30, shm_bytes=64 << 20)
    search = search_on(machine, config, RankLayout(1, 2, 2, "cuda"))
    made = search.planner.plan(config, search.layout, search.workload)
    assert "/dev/shm has" in fit_check.problems(made, machine)[0]
    assert search.remedies().startswith("What fits: shard.engine=host (")
    assert {each.plan.engine for each in search.fastest()} == {"host"}


@pytest.mark.long
def test_fastest_settings_fit_on_the_fewest_nodes() -> None:
    shape, layout = SMALL | {"vocab_size": 131072}, RankLayout(2, 2, 2, "cpu")
    found = {}
    for nodes in ("1:2", 2):
        config = planned_config(shape, train={"global_batch_size": 4}, launch={"nodes": nodes})
        planner = Planner(PlannedModel(config), Machine.from_numbers(1.15, 4, 10))
        found[nodes] = {
            each.arguments for each in Search(planner, config, layout, Workload.assumed(config)).fastest(1000)
        }
    alone = Search(planner, config, RankLayout(1, 2, 2, "cpu"), Workload.assumed(config)).candidates([1])
    too_large = {each.arguments for each in alone if not each.plan.fits}
    assert found["1:2"] and not found["1:2"] & too_large
    assert found[2] & too_large  # else nothing was shown


@pytest.mark.long
def test_too_few_remaining_nodes_are_refused() -> None:
    config = planned_config(LLAMA, launch={"nodes": "1:4", "ranks": 2})
    planner, workload = Planner(PlannedModel(config), SERVER), Workload.assumed(config)
    found = {
        str(each.changes.get("launch.nodes"))
        for each in Search(planner, config, RankLayout(1, 2, 2, "cpu"), workload).candidates()
    }
    assert "2:4" in found and "2" not in found
    of_all = Search(planner, config, RankLayout(4, 2, 2, "cpu"), workload).candidates()
    assert {str(each.changes.get("launch.nodes")) for each in of_all} >= {"8", "2", "1"}


@pytest.mark.long
def test_disk_remedy_sets_engine_host() -> None:
    small = Machine.from_numbers(0.7, 4, 10)
    config = planned_config(LLAMA | {"num_hidden_layers": 24, "hidden_size": 512}, shard={"engine": "fsdp"})
    told = search_on(small, config, RankLayout(1, 2, 2, "cpu")).remedies()
    assert told.startswith("What fits: shard.offload=disk shard.engine=host "), told


def told_of(file: Path, *more: str) -> dict[str, Any]:
    told = CliRunner().invoke(app, ["plan", str(file), "--json", *more])
    assert told.stdout, told.output
    found: dict[str, Any] = json.loads(told.stdout)
    return found


@pytest.mark.parametrize(
    ("type_", "wanted"),
    [
        ("g6.12xlarge", "shard.offload=cpu"),
        pytest.param("p5.48xlarge", "cluster.ranks_per_node=4", marks=pytest.mark.long),
    ],
)
def test_search_tries_idle_gpus_and_offload(type_: str, wanted: str) -> None:
    """The others of a node fit, or else what is beside them; what is proposed can be pasted, and fits."""
    small = ["train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=4", "shard.offload=none"]
    small.append("shard.engine=fsdp")
    machine = ["--instance", type_, "--nodes", "1", *small]
    told = told_of(GPU_RUN, *machine)
    ways = [way.rpartition(" (")[0] for way in told["advice"].removeprefix("What fits: ").split("; ")]
    assert not told["fits"] and any(wanted in way.split() for way in ways), told["advice"]
    pasted = told_of(GPU_RUN, *machine, *next(way for way in ways if wanted in way.split()).split())
    assert pasted["fits"] and pasted["nodes"] == 1


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (["--nodes", "2"], "--nodes"),
        ([], "cluster.nodes"),
        (["launch.nodes=2"], "launch.nodes"),
        (["--nodes", "2", "--ranks-per-node", "1"], "--nodes"),
    ],
    ids=str,
)
def test_nodes_are_proposed_by_the_name_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], name: str
) -> None:
    """An option wins over the section `launch`, and that over the cluster."""
    told: list[dict[str, str]] = []

    def remedies(search: Search) -> str:
        told.append(dict(search.names))
        return ""

    monkeypatch.setattr(Search, "remedies", remedies)
    told_of(GPU_RUN, "--instance", "g6.xlarge", "cluster.nodes=2", *more)
    assert told[0].get("launch.nodes", "launch.nodes") == name
    assert told[0].get("launch.ranks") == ("--ranks-per-node" if len(more) > 2 else "cluster.ranks_per_node")
    config = planned_config(SMALL)
    search = replace(search_on(SERVER, config, RankLayout(2, 2, 2, "cpu")), names=told[0])
    lines = [each.arguments for each in search.candidates([4])]
    assert lines and all(f"{name}{' ' if name == '--nodes' else '='}4" in each for each in lines)


@pytest.mark.parametrize("more", [[], ["launch.ranks=2"], ["--ranks-per-node", "2"]], ids=str)
def test_idle_gpus_get_arguments_that_use_them(more: list[str]) -> None:
    machine = ["--instance", "p5.48xlarge", "model.path=Qwen/Qwen3-0.6B"]
    told = CliRunner().invoke(app, ["plan", str(GPU_RUN), *machine, *more]).stdout
    used = rf"^note            the run uses {2 if more else 1} of 8 GPUs of each node; all with (launch.ranks=8), or "
    found = re.search(used, told, re.M)
    assert found, told
    pasted = CliRunner().invoke(app, ["plan", str(GPU_RUN), *machine, found[1]]).stdout
    assert "4 x 8 ranks x" in pasted and "GPUs of each node" not in pasted
