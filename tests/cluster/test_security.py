"""What a rendered pod may do, who may reach it, and what the images are built from."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from aliquot.cluster.check import check_manifests
from aliquot.cluster.job import Job, describe
from aliquot.cluster.job_view import job_views, pod_spec
from aliquot.cluster.manifests import parse_manifests
from aliquot.cluster.pod import ANCESTOR
from aliquot.cluster.render import documents, parsed
from aliquot.cluster.rules_security import restricted_violations
from tests.cluster.cases import cluster_section, config, cpu_job, gpu_job, plan
from tests.cluster.crd import TRAINERS
from tests.cluster.test_schemas import CASES, job_of
from tests.conftest import REPOSITORY

NAMESPACE = """
apiVersion: v1
kind: Namespace
metadata:
  name: default
  labels:
    pod-security.kubernetes.io/enforce: restricted
"""


def training_pods(job: Job) -> list[dict[str, Any]]:
    """Of the job, and of the runtime that others refer to."""
    (view,) = job_views(parsed(job))
    runtime = documents(job, runtime=True)["cluster-training-runtime.yaml"]
    return [
        pod_spec(view),
        runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"],
    ]


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("case", CASES)
def test_training_pods_are_restricted(case: str, trainer: str) -> None:
    for pod in training_pods(job_of(case, trainer)):
        assert list(restricted_violations(pod)) == []
        assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", ["kubeflow-trainer-token", "aws-iam-token", "eks-pod-identity-token"])
def test_controller_tokens_stay_restricted(name: str) -> None:
    """As Trainer's status plugin and the webhooks of EKS add them, with or without the service account's own token."""
    token = {"serviceAccountToken": {"audience": "x", "path": "token"}}
    for pod in training_pods(cpu_job(service_account="trainer")):
        pod["volumes"].append({"name": name, "projected": {"sources": [token]}})
        pod["containers"][0]["volumeMounts"].append({"name": name, "mountPath": "/var/run/secrets/x", "readOnly": True})
        assert list(restricted_violations(pod)) == []


def container(pod: dict[str, Any]) -> dict[str, Any]:
    context: dict[str, Any] = pod["containers"][0]["securityContext"]
    return context


LAPSES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "hostNetwork": lambda pod: pod.update(hostNetwork=True),
    "volume x is hostPath": lambda pod: pod["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    "sysctl kernel.msgmax": lambda pod: pod["securityContext"].update(sysctls=[{"name": "kernel.msgmax"}]),
    "container node: runAsNonRoot": lambda pod: pod["securityContext"].pop("runAsNonRoot"),
    "container node: runAsUser is 0": lambda pod: container(pod).update(runAsUser=0),
    "container node: allowPrivilegeEscalation": lambda pod: container(pod).pop("allowPrivilegeEscalation"),
    "container node: privileged": lambda pod: container(pod).update(privileged=True),
    "container node: seccompProfile": lambda pod: container(pod).update(seccompProfile={"type": "Unconfined"}),
    "container node: capabilities do not drop": lambda pod: container(pod).update(capabilities={"drop": ["CHOWN"]}),
    "container node: capabilities add IPC_LOCK": lambda pod: container(pod)["capabilities"].update(add=["IPC_LOCK"]),
    "container node: procMount": lambda pod: container(pod).update(procMount="Unmasked"),
    "container node: a hostPort": lambda pod: pod["containers"][0].update(ports=[{"hostPort": 80}]),
    "container node: a probe": lambda pod: pod["containers"][0].update(livenessProbe={"httpGet": {"host": "x"}}),
    "container node: seLinuxOptions": lambda pod: container(pod).update(seLinuxOptions={"type": "spc_t"}),
    "container node: appArmorProfile": lambda pod: container(pod).update(appArmorProfile={"type": "Unconfined"}),
    "container directories: runAsUser": lambda pod: pod["initContainers"][0]["securityContext"].update(runAsUser=0),
    "container x: ": lambda pod: pod["containers"].append({"name": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("lapse", LAPSES)
def test_security_lapses_are_findings(lapse: str) -> None:
    pod = copy.deepcopy(training_pods(cpu_job())[0])
    LAPSES[lapse](pod)
    violations = list(restricted_violations(pod))
    assert any(each.startswith(lapse) for each in violations), violations


def test_restricted_namespace_refuses_root_job() -> None:
    (namespace,) = parse_manifests(NAMESPACE, "namespace.yaml")
    (found,) = check_manifests([namespace, *parsed(cpu_job())])
    assert (found.rule, found.level) == ("pod-security", "error")
    assert "Job/llama3-8b-dirs-" in found.where and "runAsUser is 0" in found.message
    claim = cpu_job(storage={"kind": "claim", "claim": "mine"})
    assert check_manifests([namespace, *parsed(claim)]) == []


def accepts(policy: dict[str, Any], labels: dict[str, str], peer: dict[str, str] | None, port: int) -> bool:
    """Whether a pod with `labels` accepts a connection from a pod of its namespace, or from elsewhere (None)."""
    spec = policy["spec"]

    def selected(selector: dict[str, Any], by: dict[str, str]) -> bool:
        return selector["matchLabels"].items() <= by.items()

    if not selected(spec["podSelector"], labels):
        return True
    for rule in spec["ingress"]:
        sources = rule.get("from")
        from_peer = sources is None or (
            peer is not None and any(selected(each["podSelector"], peer) for each in sources)
        )
        if from_peer and ("ports" not in rule or port in [each["port"] for each in rule["ports"]]):
            return True
    return False


OWN, OTHER = ({"jobset.sigs.k8s.io/jobset-name": name, ANCESTOR: "trainer"} for name in ("llama3-8b", "other"))


@pytest.mark.parametrize("prometheus", [None, 9400])
def test_only_the_jobs_pods_are_let_in(prometheus: int | None) -> None:
    settings = config(cluster_section(), observe={"prometheus": prometheus})
    policy = documents(describe(settings, plan()))["network-policy.yaml"]
    assert policy["spec"]["policyTypes"] == ["Ingress"] and "egress" not in policy["spec"]
    for peer, port, expected in (
        (OWN, 29400, True), (OWN, 9400, True), (OTHER, 29400, False), (None, 29400, False), ({}, 29400, False),
        (OTHER, 9400, prometheus is not None), (None, 9400, prometheus is not None),
    ):  # fmt: skip
        assert accepts(policy, OWN, peer, port) is expected, (peer, port)
    assert accepts(policy, OTHER, None, 29400), "pods of others are their owners' business"


@pytest.mark.parametrize("make", [cpu_job, gpu_job])
def test_network_policy_admits_runtime_jobs_by_label(make: Callable[[], Job]) -> None:
    found = documents(make(), runtime=True)
    template = found["cluster-training-runtime.yaml"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    labels = template["spec"]["template"]["metadata"]["labels"]
    policy = found["network-policy.yaml"]
    assert accepts(policy, labels, labels, 29400) and not accepts(policy, labels, OTHER, 29400)


def test_another_render_makes_another_job() -> None:
    """A Job cannot be changed, so applying a changed one under its name would be refused."""
    names = {
        documents(job)["directories-job.yaml"]["metadata"]["name"]
        for job in (cpu_job(), cpu_job(image="other"), cpu_job())
    }
    assert len(names) == 2
    longest = documents(cpu_job(name="a" * 48))["directories-job.yaml"]["metadata"]["name"]
    assert len(longest) <= 63, "it becomes a label of its pods"


def test_gpu_image_opens_its_plugin() -> None:
    """The plugin belongs to CUDA 13, lies on the library path (a Debian package in its own directory) and opens."""
    text = (REPOSITORY / "deploy" / "Dockerfile.cuda").read_text()
    assert "deepspeed" in re.search(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)[1].split(",")  # type: ignore[index]
    release = re.search(r"^ARG EFA_INSTALLER=(\d+)\.(\d+)\.", text, re.MULTILINE)
    assert release is not None and (int(release[1]), int(release[2])) >= (1, 47)
    path = re.search(r"LD_LIBRARY_PATH=(\S+)", text)
    assert path is not None
    for directory in ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/efa/lib"):
        assert {directory, f"{directory}/x86_64-linux-gnu"} <= set(path[1].split(":"))
    opened = text.index("CDLL('libnccl-net-ofi.so')")
    assert text.index("torch==") < text.index("/opt/cudart/libcudart.so") < opened < text.index("USER 1000")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_name_no_default_index(name: str) -> None:
    assert "pypi.org" not in (REPOSITORY / "deploy" / name).read_text()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_image_inputs_are_verified(name: str) -> None:
    text = re.sub(r"\\\n", " ", (REPOSITORY / "deploy" / name).read_text())
    stages: set[str] = set()
    for base, stage in re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, re.MULTILINE):
        assert base in stages or base.endswith("@${BASE_DIGEST}"), base
        stages.add(stage)
    assert re.search(r"^ARG BASE_DIGEST=sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert not re.search(r"^ADD ", text, re.MULTILINE)
    for step in re.findall(r"^RUN .*$", text, re.MULTILINE):
        commands = [each.strip() for each in step.split("&&")]
        downloads = [number for number, each in enumerate(commands) if re.match(r"(curl|wget)\b", each)]
        for number in downloads:
            assert "|" not in commands[number], "unpacked before anybody has verified it"
            after = " ".join(commands[number + 1 :])
            assert 0 <= after.find("--verify") < after.find("tar --extract"), step
        for install in re.findall(r"pip install[^&;]*", step):
            assert "--constraint" in install, install
