"""The commands as a person runs them: exit codes, lines, files."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from aliquot.cli import instances_command
from aliquot.cli.main import app
from aliquot.config.schema import RunConfig
from aliquot.planner.plan import Plan
from tests.cluster.cases import cluster_section, plan
from tests.cluster.test_check import HAND_WRITTEN

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def aliquot(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config whose plan is made directly: what the planner says is not the matter here."""

    def plan_on(config: RunConfig, instance: str, nodes: int) -> Plan:
        ranks = config.launch.ranks if config.launch.ranks != "auto" else 2
        return plan(instance=instance, nodes=nodes, ranks_per_node=ranks, threads_per_rank=16 // ranks)

    monkeypatch.setattr(instances_command, "instance_planner", lambda config: partial(plan_on, config))
    values = {
        "run": {"name": "my_run.3"},
        "model": {"path": "meta-llama/Meta-Llama-3-8B"},
        "data": {"dataset": "wikitext"},
        "checkpoint": {"every": 100},
        "cluster": cluster_section(),
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_render(run_file: Path, tmp_path: Path) -> None:
    result = aliquot(
        "cluster", "render", run_file, "-o", tmp_path / "out", "cluster.nodes=2", "cluster.ranks_per_node=4"
    )
    assert result.exit_code == 0, result.output
    for wanted in (
        "kubectl apply --server-side -k",
        "aliquot cluster logs",
        "kubectl delete",
        "2 x r7i.8xlarge x 4 ranks",
    ):
        assert wanted in result.output
    job = yaml.safe_load((tmp_path / "out" / "train-job.yaml").read_text())
    assert job["metadata"]["name"] == "my-run-3"
    assert (job["spec"]["trainer"]["numNodes"], job["spec"]["trainer"]["numProcPerNode"]) == (2, 4)
    assert aliquot("cluster", "check", tmp_path / "out").exit_code == 0


def test_render_a_proof(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "proof"
    result = aliquot("cluster", "render", run_file, "--proof", "-o", out)
    assert result.exit_code == 0 and f"kubectl apply --server-side -k {out}" in result.output, result.output
    assert "cluster\n" in (out / "train-job.yaml").read_text()
    result = aliquot("cluster", "render", run_file, "--proof", "--runtime")
    assert result.exit_code == 2 and "give one of them" in result.stderr
    result = aliquot("cluster", "proof", run_file, out / "train-job.yaml")
    assert result.exit_code == 2 and "train-job.yaml: not the expectations of a plan" in result.stderr


def test_errors_are_not_rendered(run_file: Path, tmp_path: Path) -> None:
    result = aliquot("cluster", "render", run_file, "-o", tmp_path / "out", "checkpoint.resume=never")
    assert result.exit_code == 1 and "error: checkpoint.resume" in result.output
    assert "nothing was written" in result.output and not (tmp_path / "out").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("path", "directory"),
    [
        ("meta-llama/Meta-Llama-3-8B", None),
        ("/fsx/models/Qwen3-8B", None),
        ("/fsx/models/mine", "mine"),
        ("/fsx/models/mine", None),
    ],
)
def test_models_are_planned_without_network(
    path: str, directory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A well-known name is enough, and for a directory of the cluster its config.json."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2048} | TINY))
    section = cluster_section(**({} if directory is None else {"model_directory": directory}))
    values = {"model": {"path": path}, "data": {"path": "/fsx/data"}, "checkpoint": {"every": 9}, "cluster": section}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    result = aliquot("cluster", "render", "run.yaml", "-o", "out", "launch.device=cpu")
    if path.endswith("mine") and directory is None:
        assert result.exit_code == 2 and "cluster.model_directory" in result.stderr
        return
    assert result.exit_code == 0, result.output
    shipped = yaml.safe_load((tmp_path / "out" / "config-map.yaml").read_text())["data"]["config.yaml"]
    assert yaml.safe_load(shipped)["model"] == {"path": path}


def test_check_a_config(run_file: Path) -> None:
    result = aliquot("cluster", "check", run_file)
    assert (result.exit_code, result.output.strip()) == (0, "9 objects, nothing found")
    result = aliquot("cluster", "check", run_file, "checkpoint.resume=never")
    assert result.exit_code == 1
    assert "error: checkpoint.resume" in result.output and "fix: checkpoint.resume: auto" in result.output


def test_check_manifests_as_json(tmp_path: Path) -> None:
    (tmp_path / "hand.yaml").write_text(HAND_WRITTEN)
    result = aliquot("cluster", "check", tmp_path, "--json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    assert {"rule", "level", "where", "message", "fix", "reason"} == set(found[0])
    assert "processes" in {each["rule"] for each in found}
    assert aliquot("cluster", "check", tmp_path / "hand.yaml").exit_code == 1  # a single file, too


def test_bad_input_is_one_line(run_file: Path, tmp_path: Path) -> None:
    result = aliquot("cluster", "render", run_file, "cluster.nods=2")
    assert result.exit_code == 2
    assert "unknown key cluster.nods; did you mean cluster.nodes?" in result.stderr
    result = aliquot("cluster", "render", run_file, "cluster.storage.mountname=")
    assert result.exit_code == 2 and "mountname" in result.stderr
    (tmp_path / "plain.yaml").write_text("model: {path: x}\ndata: {path: stdlib}\n")
    result = aliquot("cluster", "check", tmp_path / "plain.yaml")
    assert result.exit_code == 2 and "no `cluster:` section" in result.stderr
    assert aliquot("cluster", "check", tmp_path / "missing.yaml").exit_code == 2


def test_instances() -> None:
    result = aliquot("instances", "c7i.*,r7i.*", "--min-memory", "100", "--max-price", "3", "--sort", "price-per-gib")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split()[:3] == ["type", "vCPU", "cores"]
    assert lines[1].startswith("r7i.") and "catalogue of 2026-07-20" in lines[-1]
    found = json.loads(aliquot("instances", "--efa", "--gpu", "--max-price", "5", "--json").output)
    assert "g6e.8xlarge" in {each["name"] for each in found}
    assert all(each["gpus"] and each["efa_interfaces"] for each in found)
    prices = [each["usd_per_hour"] for each in found]
    assert prices == sorted(prices)
    assert aliquot("instances", "nothing.*").exit_code == 2


def test_instances_filters_by_pattern_and_efa() -> None:
    """`describe-instance-types` with efa-supported for *7i*."""
    found = json.loads(aliquot("instances", "*7i*", "--efa", "--json").output)
    names = {each["name"] for each in found}
    assert {"c7i.48xlarge", "m7i.metal-48xl", "r7i.48xlarge", "u7i-6tb.112xlarge", "i7i.24xlarge"} <= names
    assert "c7i.24xlarge" not in names


def test_fits(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cheapest first, by the plan of each type; a type that the plan refuses does not appear."""
    from aliquot.catalogue.instances import instance
    from aliquot.core.errors import EngineError

    def plan_on(name: str, nodes: int) -> Plan:
        if name.startswith("m7i"):
            raise EngineError("not here")
        return plan(instance=name, nodes=nodes, limit_bytes_per_node=instance(name).allocatable_memory_bytes)

    monkeypatch.setattr(instances_command, "instance_planner", lambda config: plan_on)
    refused = aliquot("instances", "m7i.*", "--fits", run_file)
    assert refused.exit_code == 2 and "not here" in refused.stderr
    result = aliquot("instances", "c7i.*,m7i.*,r7i.*", "--max-vcpus", "96", "--fits", run_file, "--json")
    found = json.loads(result.output)
    assert found[0]["name"] == "r7i.4xlarge"  # 76 GiB of its 128; c7i.8xlarge has 56
    assert not any(each["name"].startswith("m7i") for each in found)
    assert all(each["allocatable_memory_bytes"] >= 76 << 30 for each in found)


def test_fits_reports_errors_of_the_config(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: ./nothing}\ndata: {path: stdlib}\n")
    result = aliquot("instances", "c7i.*", "--fits", file)
    assert result.exit_code == 2
    assert "model.path ./nothing: no such directory" in result.stderr and "no EC2 type" not in result.stderr


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["c7a.8xlarge", "r8g.8xlarge", "c7a.48xlarge", "r7i.8xlarge"])
def test_pod_is_planned_with_its_whole_cpus(tmp_path: Path, name: str) -> None:
    """Also where a CPU is a whole core, so that the node has more cores than its daemonsets leave."""
    values = {
        "model": {"config": {"model_type": "llama", **TINY}},
        "data": {"path": "stdlib", "tokenizer_vocab_size": 512},
        "train": {"global_batch_size": 64},
        "checkpoint": {"every": 100},
        "cluster": cluster_section(instance_types=[name]),
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    result = aliquot("cluster", "check", file)
    found = set(re.findall(r"\[([a-z-]+)\]$", result.output, re.MULTILINE))
    assert (result.exit_code, found) == (0, {"architecture"} if name.startswith("r8g") else set()), result.output
    result = aliquot("cluster", "check", file, "launch.threads_per_rank=33")  # its own number still counts
    assert "[threads]" in result.output
