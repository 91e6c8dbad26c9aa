"""The exact bytes of two renders, so that a change of any of them is seen in review.

ALIQUOT_UPDATE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aliquot import __version__
from aliquot.cluster.check import check_manifests
from aliquot.cluster.job import Job, describe
from aliquot.cluster.manifests import parse_manifests
from aliquot.cluster.render import commands, render, write
from aliquot.config.read_config import read_config
from aliquot.core.errors import ClusterError
from aliquot.planner.plan import PhaseMemory
from tests.cluster.cases import cpu_job, dynamic_storage, gpu_job, plan
from tests.conftest import REPOSITORY

GOLDEN = Path(__file__).parent / "golden"
JOBS = {
    "cpu": cpu_job,
    "gpu-trainer-2.1": lambda: gpu_job(trainer="2.1", storage=dynamic_storage(), zone=None, create_namespace=True,
                                       namespace="training", queue="gpus", gang_scheduling="coscheduling",
                                       priority_class="training"),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_golden(name: str) -> None:
    job: Job = JOBS[name]()
    files = render(job, "0.1.0")
    lines = [f"# {what}\n{line}\n" for what, line in commands(job, Path("manifests/llama3-8b"))]
    files["commands.txt"] = "".join(lines)
    if os.environ.get("ALIQUOT_UPDATE_GOLDEN"):
        write(files, GOLDEN / name)
    assert {file.name: file.read_text() for file in (GOLDEN / name).iterdir()} == files


def test_twice_the_same() -> None:
    assert render(cpu_job(), "0.1.0") == render(cpu_job(), "0.1.0")


def test_another_jobs_manifests_stay(tmp_path: Path) -> None:
    write(render(cpu_job(), "0.1.0"), tmp_path)
    write(render(cpu_job(), "0.1.0"), tmp_path)
    with pytest.raises(ClusterError, match="another job, llama3-8b"):
        write(render(cpu_job(name="other"), "0.1.0"), tmp_path)


def test_kustomization_lists_all() -> None:
    for make in JOBS.values():
        files = render(make(), "0.1.0")
        listed = files.pop("kustomization.yaml")
        assert all(f"  - {name}\n" in listed for name in files)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_deploy_runtimes_equal_the_examples(device: str) -> None:
    """`aliquot cluster render examples/llama3-8b-cpu.yaml --runtime -o deploy/aliquot-cpu cluster.name=aliquot-cpu`."""
    settings = read_config(REPOSITORY / "examples" / f"llama3-8b-{device}.yaml", [f"cluster.name=aliquot-{device}"])
    assert settings.cluster is not None
    foreseen = plan(
        device="cpu" if device == "cpu" else "cuda", engine="host" if device == "cpu" else "fsdp",
        ranks_per_node=2 if device == "cpu" else 1,
        nodes=settings.cluster.nodes, instance=settings.cluster.instance_types[0],
        phases=(PhaseMemory("steady peak", {"all": 1}, {}),),
        shm_bytes_per_node=0 if device == "cpu" else 64 << 20,
    )  # fmt: skip
    files = render(describe(settings, foreseen), __version__, runtime=True)
    directory = REPOSITORY / "deploy" / f"aliquot-{device}"
    if os.environ.get("ALIQUOT_UPDATE_GOLDEN"):
        write(files, directory)
    assert {file.name: file.read_text() for file in directory.iterdir()} == files
    assert check_manifests([one for name, text in files.items() for one in parse_manifests(text, name)]) == []
