"""Everything rendered, against the real schemas: CRDs with their CEL rules, core kinds strictly."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from aliquot.cluster.job import Job
from aliquot.cluster.render import documents
from aliquot.cluster.rules_schemas import KUBERNETES
from tests.cluster.cases import cpu_job, disk_job, dynamic_storage, gpu_job
from tests.cluster.crd import TRAINERS, is_custom, needs_crds, problems

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
    job: Job = make(trainer=trainer, **changes)
    return job


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
