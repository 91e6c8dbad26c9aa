"""Everything rendered, against the real schemas: CRDs with their CEL rules, core kinds strictly.

The exact bytes of two renders; ALIQUOT_UPDATE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from aliquot import __version__
from aliquot.cluster.check import KUBERNETES, check_manifests
from aliquot.cluster.job import Job, describe
from aliquot.cluster.manifests import read_manifests
from aliquot.cluster.render import commands, documents, render, write
from aliquot.config.read_config import read_config
from aliquot.core.errors import ClusterError
from aliquot.planner.plan import PhaseMemory
from tests.cluster.cases import cpu_job, disk_job, dynamic_storage, gpu_job, plan
from tests.cluster.crd import TRAINERS, is_custom, needs_crds, problems
from tests.conftest import REPOSITORY

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "cpu": (cpu_job, {}),
    "cpu, dynamic storage, any zone": (cpu_job, {"storage": dynamic_storage(), "zone": None}),
    "cpu, own claim, spot": (
        cpu_job,
        {"storage": {"kind": "claim", "claim": "mine"}, "capacity": ["spot", "on-demand"]},
    ),
    "cpu, reserved": (cpu_job, {"capacity": ["reserved"], "capacity_reservation": "cr-0123456789abcdef0"}),
    "cpu, Graviton": (cpu_job, {"instance_types": ["r8g.8xlarge"]}),
    "cpu, states on disk": (disk_job, {}),
    "gpu": (gpu_job, {}),
    "gpu, user data, queue, account": (
        gpu_job,
        {"user_data": "#!/bin/bash\necho hello\n", "queue": "training", "service_account": "trainer"},
    ),
    "cpu, bottlerocket, namespace": (
        cpu_job,
        {"ami": "bottlerocket@v1.55.0", "create_namespace": True, "namespace": "training"},
    ),
    "cpu, placement group by name": (cpu_job, {"placement_group": "training"}),
    "cpu, placement group by id": (cpu_job, {"placement_group": "pg-0123456789abcdef0"}),
}


def job_of(case: str, trainer: str) -> Job:
    make, changes = CASES[case]
    return make(trainer=trainer, **changes)


@needs_crds
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("case", CASES)
def test_custom_resources(case: str, trainer: str) -> None:
    for name, document in documents(job_of(case, trainer)).items():
        if is_custom(document):
            assert problems(document, trainer) == [], name


@pytest.mark.few(10)
@needs_crds
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("case", CASES)
def test_core_kinds(case: str, trainer: str) -> None:
    seen = set()
    for document in documents(job_of(case, trainer)).values():
        if not is_custom(document):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
            seen.add(document["kind"])
    assert "ConfigMap" in seen


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("case", CASES)
def test_pods_of_the_runtime(case: str, trainer: str) -> None:
    """The pod template inside the runtime, and what is patched onto it, are core kinds, too."""
    found = documents(job_of(case, trainer))
    runtime_job = found["training-runtime.yaml"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    patch = patched_pod(found["train-job.yaml"])
    spec = runtime_job["spec"]["template"]["spec"]
    merged = {**spec, **{key: value for key, value in patch.items() if key != "containers"}}
    merged["containers"] = [{**spec["containers"][0], **patch["containers"][0]}]
    job = {**runtime_job["spec"], "template": {**runtime_job["spec"]["template"], "spec": merged}}
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
    kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    assert merged["terminationGracePeriodSeconds"] == 120


@needs_crds
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("case", CASES)
def test_job_set_of_a_train_job(case: str, trainer: str) -> None:
    """The runtime's template is a JobSet's spec, which the controller sends with the job's number of nodes."""
    spec = documents(job_of(case, trainer))["training-runtime.yaml"]["spec"]["template"]["spec"]
    spec["replicatedJobs"][0]["template"]["spec"] |= {"parallelism": 4, "completions": 4}
    job_set = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "x"}, "spec": spec}
    assert problems(job_set, trainer) == []
    spec["failurePolicy"]["rules"][0]["action"] = "Restart"
    assert problems(job_set, trainer) != []


def patched_pod(train_job: dict[str, Any]) -> dict[str, Any]:
    spec = train_job["spec"]
    if "podTemplateOverrides" in spec:
        (override,) = spec["podTemplateOverrides"]
        pod: dict[str, Any] = override["spec"]
    else:
        (patch,) = spec["runtimePatches"]
        (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = replicated["template"]["spec"]["template"]["spec"]
    return pod


@needs_crds
@pytest.mark.parametrize("trainer, wrong", [("2.1", "runtimePatches"), ("2.3", "podTemplateOverrides")])
def test_the_other_dialect_is_refused(trainer: str, wrong: str) -> None:
    (other,) = set(TRAINERS) - {trainer}
    job = documents(cpu_job(trainer=other))["train-job.yaml"]
    assert any(wrong in problem for problem in problems(job, trainer))


@needs_crds
@pytest.mark.parametrize(
    "file, change, says",
    [
        ("node-pool.yaml", lambda spec: spec["disruption"].update(consolidationPolicy="Sometimes"), "Sometimes"),
        ("node-pool.yaml", lambda spec: spec.update(limit={}), "did you mean limits"),
        ("node-pool.yaml", lambda spec: spec["template"]["spec"]["requirements"][0].update(values=[]), "In"),
        (
            "node-pool.yaml",
            lambda spec: spec["template"]["metadata"]["labels"].update({"karpenter.sh/x": "y"}),
            "label",
        ),
        ("node-class.yaml", lambda spec: spec["amiSelectorTerms"].append({"id": "ami-1"}), "alias"),
        ("node-class.yaml", lambda spec: spec["blockDeviceMappings"][0]["ebs"].update(volumeSize="big"), "text like"),
        ("train-job.yaml", lambda spec: spec["trainer"].update(numProcPerNode="auto"), "an integer"),
        ("train-job.yaml", lambda spec: spec["trainer"].update(nodes=4), "spec.trainer.nodes"),
        ("training-runtime.yaml", lambda spec: spec["mlPolicy"].update(mpi={}), "mlPolicy"),
    ],
)
def test_the_validator_can_refuse(file: str, change: Any, says: str) -> None:
    document = documents(cpu_job())[file]
    change(document["spec"])
    found = problems(document)
    assert found and any(says in each for each in found), found


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
    assert check_manifests(read_manifests(directory)) == []
