"""The job that compares the nodes with the plan before the long one: its manifests, its program, its verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from aliquot.cluster.check import check_manifests
from aliquot.cluster.job import Job
from aliquot.cluster.render import documents, parsed
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.topology import Topology
from aliquot.doctor import node_proof
from aliquot.doctor.finding import Finding, Subject
from aliquot.doctor.node_proof import Expected, efa_sent_bytes, judge_efa, judge_rate, read_expected
from tests.cluster.cases import cpu_job, gpu_job
from tests.cluster.nodes import Cluster, small_job
from tests.cluster.test_elastic import elastic
from tests.doctor.machines import lay_out
from tests.multinode.namespaces import switched_hosts, why_not
from tests.processes import as_ranks, run_ranks

EXPECTED = Expected(nodes=4, network_bytes_per_s=1e9, storage_bytes_per_s=1e8, efa_interfaces=1)


@pytest.mark.parametrize("make", [cpu_job, gpu_job, elastic])
def test_only_config_and_command_differ_from_the_long_job(make: Callable[[], Job], tmp_path: Path) -> None:
    """The nodes, the image, the volumes and the environment are those of the long job."""
    job = make()
    long, proof = documents(job), documents(replace(job, is_proof=True))
    assert [name for name in long if long[name] != proof[name]] == ["config-map.yaml", "train-job.yaml"]
    trainer = proof["train-job.yaml"]["spec"]["trainer"]
    program, config = trainer["command"][:3], [Path(path).name for path in trainer["command"][3:]]
    assert program == ["aliquot", "cluster", "proof"]
    trainer["command"] = long["train-job.yaml"]["spec"]["trainer"]["command"]
    assert long["train-job.yaml"] == proof["train-job.yaml"]
    data = proof["config-map.yaml"]["data"]
    assert yaml.safe_load(data[config[0]])["launch"]["nodes"] == 4  # a number, for elastic jobs, too
    (tmp_path / config[1]).write_text(data[config[1]])
    expected = read_expected(tmp_path / config[1])
    assert expected.efa_interfaces == job.efa_interfaces and expected.nodes == 4
    assert check_manifests(parsed(replace(job, is_proof=True))) == []


def test_two_ranks_measure(tmp_path: Path) -> None:
    """Real gloo between two ranks, a real file; every rank comes to the same verdict."""
    run_ranks(Path(__file__), 2, tmp_path)
    proof, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert proof == other
    rows = {row["subject"]: row for row in proof["rows"]}
    assert list(rows) == [
        "nodes",
        "doctor on 2 nodes",
        "all-gather of 2 ranks, sent by a node",
        "EFA",
        "written by 2 ranks",
    ]
    assert [row["subject"] for row in proof["rows"] if row["fix"]] == ["doctor on 2 nodes", "EFA"]
    assert rows["doctor on 2 nodes"]["measured"] == "1 problem, 2 warnings"
    assert rows["EFA"]["measured"] == "not used"
    assert len(proof["notes"]) == 2 and proof["notes"][0].startswith("2 nodes, first ")
    assert "fix: more cores" in proof["notes"][0] and "storage: read-only" in proof["notes"][1]


@pytest.mark.parametrize(("measured", "is_problem"), [(2e9, False), (5e8, False), (4.9e8, True)])
def test_less_than_half_of_a_rate_is_a_problem(measured: float, is_problem: bool) -> None:
    row = judge_rate("network", 1e9, measured, "fix")
    assert bool(row.fix) is is_problem and row.expected == "1 GB/s"


@pytest.mark.parametrize(
    ("interfaces", "grown", "measured", "is_problem"),
    [
        (1, 8000, "8 kB of 8 kB", False),
        (1, 0, "not used", True),
        (1, 3000, "3 kB of 8 kB", True),  # the bytes of something else
        (0, 0, "not used", False),
    ],
)
def test_efa(interfaces: int, grown: int, measured: str, is_problem: bool, tmp_path: Path) -> None:
    """The counters of the devices tell whether NCCL has used them."""
    counter = "sys/class/infiniband/{}/ports/1/hw_counters/tx_bytes"
    lay_out(tmp_path, {counter.format("rdmap0s6"): "700\n", counter.format("rdmap1s6"): "0\n"})
    before = efa_sent_bytes(tmp_path)
    lay_out(tmp_path, {counter.format("rdmap1s6"): f"{grown}\n"})
    row = judge_efa(replace(EXPECTED, efa_interfaces=interfaces), 8000, efa_sent_bytes(tmp_path) - before)
    assert row.measured == measured and bool(row.fix) is is_problem


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("network_bytes_per_s", [0.5e6, 25e6])
def test_rendered_proof_runs(network_bytes_per_s: float, tmp_path: Path) -> None:
    """Two nodes, with the doctor, over links of 20 Mbit/s: as planned, and far below the planned rate."""
    shared, sections = tmp_path / "shared", {"launch": {"threads_per_rank": 1}}
    rates = {"storage_bytes_per_s": 1e6, "network_bytes_per_s": network_bytes_per_s}
    job = replace(small_job(shared, "two", 2, sections, **rates), is_proof=True)
    with switched_hosts(2, rate="20mbit") as hosts:
        cluster = Cluster(job, hosts, tmp_path / "pods", shared)
        try:
            results = [pod.ended(600) for pod in cluster.start()]
        finally:
            cluster.stop()
    log = results[0][1]
    as_planned = "PROBLEM" not in log
    assert [code for code, _ in results] == [0, 0] if as_planned else [2, 2], results
    subjects = ("nodes", "all-gather of 2 ranks, sent by a node", "EFA", "written by 2 ranks")
    verdicts = [line.split()[-1] for subject in subjects for line in log.splitlines() if line.startswith(f"{subject} ")]
    assert verdicts == ["ok", "ok" if network_bytes_per_s < 1e6 else "PROBLEM", "ok", "ok"], log
    assert cluster.decision([2, 2]) == "FailJobSet"
    assert not list((shared / "runs" / "two").glob("[!.]*")), "the proof leaves a file in the run directory"


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    """A rank of two nodes with one rank each, where the doctor finds a problem on the second node."""

    def examine(subject: Subject) -> Iterator[Finding]:  # the real doctor takes ten seconds
        yield Finding("ok", "madvise", "nothing to do", id="thp", title="huge pages")
        yield Finding("warning", "shared", "slower", "more cores", id="cores", title="cores")
        if rank == 1:
            yield Finding("problem", "read-only", "no run can be written here", id="storage", title="run directory")

    node_proof.examine = examine
    topology = Topology(rank, world_size, 0, 1, rank, world_size, "cpu", threads=1, cores=())
    ranks = Ranks(topology, frozenset({0}))
    expected = node_proof.Expected(world_size, network_bytes_per_s=1e6, storage_bytes_per_s=1e6, efa_interfaces=1)
    proof = node_proof.measure(ranks, folder, expected)
    (folder / f"{rank}.json").write_text(json.dumps(asdict(proof)))


if __name__ == "__main__":
    as_ranks(work)
