"""The exact bytes of two renders, so that a change of any of them is seen in review.

ALIQUOT_UPDATE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aliquot.cluster.job import Job
from aliquot.cluster.render import commands, render, write
from tests.cluster.cases import cpu_job, dynamic_storage, gpu_job

GOLDEN = Path(__file__).parent / "golden"
JOBS = {
    "cpu": cpu_job,
    "gpu-trainer-2.1": lambda: gpu_job(trainer="2.1", storage=dynamic_storage(), zone=None, create_namespace=True,
                                       namespace="training", queue="gpus"),
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


def test_kustomization_lists_all() -> None:
    for make in JOBS.values():
        files = render(make(), "0.1.0")
        listed = files.pop("kustomization.yaml")
        assert all(f"  - {name}\n" in listed for name in files)
