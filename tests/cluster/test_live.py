"""What the cluster says: a recorded API server that refuses, asked by the real kubectl; versions; quotas.

`aliquot cluster status` and `logs`: a job's pods in words, by recorded answers and against an API server.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from aliquot.cluster import live_cluster
from aliquot.cluster.capacity import check_quota
from aliquot.cluster.job_status import job_pods, why_waiting
from aliquot.cluster.job_view import job_views
from aliquot.cluster.live_cluster import Kubectl, Refused, Version, ask_cluster, check_versions, operator_versions
from aliquot.cluster.manifests import ManifestObject
from aliquot.cluster.render import documents, parsed
from aliquot.core.errors import ClusterError
from tests.cluster.apiserver import NEEDS_SERVER, kubectl
from tests.cluster.cases import cpu_job
from tests.cluster.crd import TRAINERS
from tests.stores.http_server import Handler, serving

# As EKS answers a user whose role has no binding.
_GROUPS = {
    "apiextensions.k8s.io": ("v1", [("customresourcedefinitions", "CustomResourceDefinition", False)]),
    "apps": ("v1", [("deployments", "Deployment", True)]),
}
_CORE = [("secrets", "Secret", True), ("resourcequotas", "ResourceQuota", True)]


def resources(version: str, kinds: list[tuple[str, str, bool]]) -> dict[str, Any]:
    listed = [
        {"name": name, "kind": kind, "namespaced": spaced, "singularName": "", "verbs": ["get", "list"]}
        for name, kind, spaced in kinds
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}


class Refusing(Handler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        parts = path.split("/")
        if path == "api":
            self.answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "apis":
            groups = [
                {"name": name, "versions": [{"groupVersion": f"{name}/{version}", "version": version}],
                 "preferredVersion": {"groupVersion": f"{name}/{version}", "version": version}}
                for name, (version, _) in _GROUPS.items()
            ]  # fmt: skip
            self.answer({"kind": "APIGroupList", "groups": groups})
        elif path == "api/v1":
            self.answer(resources("v1", _CORE))
        elif len(parts) == 3 and parts[0] == "apis":
            self.answer(resources(f"{parts[1]}/{parts[2]}", _GROUPS[parts[1]][1]))
        else:
            group = parts[1] if parts[0] == "apis" else ""
            rest = parts[3:] if parts[0] == "apis" else parts[2:]
            spaced = rest[2:] if rest and rest[0] == "namespaces" else rest
            verb = "get" if len(spaced) > 1 else "list"
            name = spaced[0] if spaced else path
            message = f'{name} is forbidden: User "dev" cannot {verb} resource "{name}" in API group "{group}"'
            self.answer({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden",
                         "message": message, "code": 403}, 403)  # fmt: skip


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with serving(Refusing) as address:
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "x", "cluster": {"server": address}}],
            "users": [{"name": "x", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        }  # fmt: skip
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(file))
        monkeypatch.setenv("HOME", str(tmp_path))  # where kubectl caches what a server has
        yield


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_refusal_names_verb_and_resource(refusing: None) -> None:
    manifests = [each for each in parsed(cpu_job()) if each.kind != "EC2NodeClass"]
    found = ask_cluster(manifests, None)
    permissions = {each.message for each in found if each.rule == "permission"}
    assert {
        "list customresourcedefinitions.apiextensions.k8s.io was refused",
        "get secrets was refused",
        "list resourcequotas was refused",
    } <= permissions
    assert all(each.level == "warning" for each in found if each.rule == "permission")
    assert not any("\n" in each.message for each in found)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_no_cluster_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))  # kubectl then asks localhost:8080
    with pytest.raises(ClusterError, match=r"^no cluster answers kubectl: .*update-kubeconfig"):
        ask_cluster(parsed(cpu_job()), None)


class Answers(Kubectl):
    """kubectl with recorded lists."""

    lists: dict[str, list[dict[str, Any]]]

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        return self.lists[arguments[0]]


def answers(**lists: list[dict[str, Any]]) -> Answers:
    kubectl = Answers()
    object.__setattr__(kubectl, "lists", lists)
    return kubectl


def test_missing_operators() -> None:
    kubectl = answers(
        customresourcedefinitions=[{"metadata": {"name": "x"}, "spec": {"group": "karpenter.sh"}}], deployments=[]
    )
    found = list(live_cluster._operators(kubectl, parsed(cpu_job())))
    assert {each.where for each in found} == {"karpenter.k8s.aws", "trainer.kubeflow.org"}
    found = list(live_cluster._operators(kubectl, parsed(cpu_job(gang_scheduling="volcano"))))
    assert {each.where for each in found} == {"karpenter.k8s.aws", "trainer.kubeflow.org", "scheduling.volcano.sh"}


class WithoutNamespace(Kubectl):
    """A server's recorded answer to a dry run in a namespace that does not exist."""

    def run(self, *arguments: str, text: str | None = None) -> str:
        if yaml.safe_load(str(text))["metadata"].get("namespace") == "training":
            raise Refused('Error from server (NotFound): namespaces "training" not found')
        return ""


def test_namespace_not_yet_created() -> None:
    made = parsed(cpu_job(namespace="training", create_namespace=True))
    assert list(live_cluster._dry_run(WithoutNamespace(), made)) == []
    found = list(live_cluster._dry_run(WithoutNamespace(), parsed(cpu_job(namespace="training"))))
    assert {each.rule for each in found} == {"refused-by-server"}


def test_quota() -> None:
    (view,) = job_views(parsed(cpu_job()))
    hard = {"requests.cpu": "100", "limits.memory": "4Ti"}
    quota = {"metadata": {"name": "team"}, "status": {"hard": hard, "used": {"requests.cpu": "8"}}}
    (found,) = live_cluster._quotas(answers(resourcequotas=[quota]), parsed(cpu_job()))
    assert (
        found.message
        == "4 nodes need 132 requests.cpu, and requests.cpu is 100 in ResourceQuota team, with what is in use"
    )
    assert list(check_quota(view, "team", {"requests.cpu": "124"}, {})) == []


def deployment(image: str) -> dict[str, Any]:
    return {"spec": {"template": {"spec": {"containers": [{"image": image}]}}}}


def test_versions_from_images() -> None:
    found = operator_versions(
        [
            deployment("ghcr.io/kubeflow/trainer/trainer-controller-manager:v2.1.0"),
            deployment("registry.k8s.io/jobset/jobset:v0.10.1@sha256:abc"),
            deployment("registry.k8s.io/kueue/kueue:v0.19.2"),
            deployment("localhost:5000/kueue/other"),
        ]
    )
    assert found == {"trainer": (2, 1), "jobset": (0, 10), "kueue": (0, 19)}


@pytest.mark.parametrize(
    "installed, queue, rules",
    [
        ({"kueue": (0, 19)}, "q", []),
        ({"jobset": (0, 10)}, None, ["versions"]),
        ({"trainer": (2, 1), "jobset": (0, 10)}, None, []),
        ({"trainer": (2, 1), "jobset": (0, 10), "kueue": (0, 19)}, "q", ["versions"]),
        ({"kueue": (0, 16)}, "q", ["versions"]),
        (dict.fromkeys(("trainer", "jobset")), None, []),
    ],
)
def test_version_rules(installed: dict[str, Version | None], queue: str | None, rules: list[str]) -> None:
    everywhere = {"trainer": (2, 3), "jobset": (0, 12)} | installed
    known = {name: version for name, version in everywhere.items() if version is not None}
    manifests: list[ManifestObject] = parsed(cpu_job(queue=queue))
    assert [each.rule for each in check_versions(known, manifests)] == rules


class Named(Kubectl):
    """Answers with the objects that exist, by `resource/name`, and refuses others as kubectl does."""

    def __init__(self, *objects: str) -> None:
        object.__setattr__(self, "objects", objects)

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        name = f"{arguments[0].partition('.')[0]}/{arguments[1]}"
        if name not in self.objects:  # type: ignore[attr-defined]
            raise Refused(f'Error from server (NotFound): {arguments[0]} "{arguments[1]}" not found')
        return [{"spec": {"clusterQueue": "all"}}]


@pytest.mark.parametrize(
    ("objects", "rules"),
    [
        (("localqueues/gpus", "clusterqueues/all", "serviceaccount/trainer", "priorityclass/high"), []),
        (("localqueues/gpus", "serviceaccount/trainer", "priorityclass/high"), ["queue"]),
        (("clusterqueues/all", "serviceaccount/trainer", "priorityclass/high"), ["queue"]),
        (("localqueues/gpus", "clusterqueues/all"), ["priority-class", "service-account"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_queue_priority_and_service_account(objects: tuple[str, ...], rules: list[str], trainer: str) -> None:
    job = cpu_job(queue="gpus", service_account="trainer", priority_class="high", trainer=trainer)
    assert [each.rule for each in live_cluster._named_objects(Named(*objects), parsed(job))] == rules


POOL = "jobset.sigs.k8s.io/jobset-name"


def pod(index: int, phase: str, node: str | None = None, attempt: int = 0, **status: Any) -> dict[str, Any]:
    labels = {
        POOL: "llama3-8b",
        "batch.kubernetes.io/job-completion-index": str(index),
        "jobset.sigs.k8s.io/restart-attempt": str(attempt),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"llama3-8b-node-0-{index}-{attempt}", "namespace": "default", "labels": labels},
        "spec": {"containers": [{"name": "node", "image": "x"}], **({"nodeName": node} if node else {})},
        "status": {"phase": phase, **status},
    }


def unschedulable(message: str, reason: str = "Unschedulable") -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return {"conditions": [condition]}


def waiting(reason: str, message: str = "", kind: str = "containerStatuses") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {kind: [{"name": "node", "state": state, "image": "x", "imageID": "", "ready": False, "restartCount": 0}]}


def test_status_shows_the_newest_replacement_pod() -> None:
    """Names are random, and a pod that was lost stays in the list."""
    pods = [pod(1, "Running"), pod(0, "Running"), pod(0, "Failed")]
    for each, made, end in zip(pods, ("10:00", "11:30", "10:00"), ("b", "a", "z"), strict=True):
        each["metadata"] |= {"creationTimestamp": f"2026-01-01T{made}:00Z", "name": f"llama3-8b-node-0-{end}"}
    answers: Any = SimpleNamespace(get=lambda *_: pods)
    assert [each["metadata"]["name"][-1] for each in job_pods("llama3-8b", "default", answers)] == ["a", "b"]


TAINT = "0/3 nodes are available: 3 node(s) had untolerated taint {intel.com/amx: present}."


@pytest.mark.parametrize(
    "status, says",
    [
        (unschedulable("0/3 nodes are available: 3 Insufficient cpu."), "no node has enough cpu free"),
        (unschedulable(TAINT), "nodes have the taint intel.com/amx: present, which the pod does not tolerate"),
        (unschedulable("0/1: 1 node(s) didn't match Pod's node affinity/selector."), "no node has the labels"),
        (unschedulable('persistentvolumeclaim "x-fsx" not found'), "the claim x-fsx does not exist"),
        (unschedulable("something new"), "no node can take the pod (something new)"),
        (unschedulable("", "SchedulingGated"), "the job waits until its queue admits the job"),
        (waiting("ImagePullBackOff", "403"), "the image cannot be pulled (403)"),
        (waiting("CreateContainerConfigError", 'secret "hf-token" not found'), 'is missing (secret "hf-token"'),
        (waiting("ContainerCreating"), "volumes are being mounted, the image pulled (MountVolume failed)"),
        (waiting("CrashLoopBackOff", "x", "initContainerStatuses"), "ends again and again"),
        (
            {"initContainerStatuses": [{"state": {"running": {}}}]},
            "the pod waits for the Job that makes the directories",
        ),
        ({}, "MountVolume failed"),
    ],
)
def test_why_a_pod_waits(status: dict[str, Any], says: str) -> None:
    events = [
        {"involvedObject": {"name": "llama3-8b-node-0-0-0"}, "type": "Warning", "message": "MountVolume failed"},
        {"involvedObject": {"name": "another"}, "type": "Warning", "message": "not ours"},
    ]
    found = why_waiting(pod(0, "Pending", **status), events)
    assert found is not None and says in found
    assert why_waiting(pod(0, "Running", **status), events) is None


def aliquot(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("aliquot")), "cluster", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=os.environ)


class TestOnAServer:
    pytestmark = NEEDS_SERVER

    def test_no_such_job(self, trainer: str) -> None:
        for command in ("status", "logs"):
            result = aliquot(command, "none", *(["-n", "nowhere"] if command == "logs" else []))
            assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
        assert "TrainJob default/none does not exist" in aliquot("status", "none").stderr

    def test_a_job_in_words(self, trainer: str) -> None:
        job = documents(cpu_job(trainer=trainer))["train-job.yaml"]
        labels = {"node.kubernetes.io/instance-type": "r7i.8xlarge", "karpenter.sh/capacity-type": "spot"}
        ready = {"conditions": [{"type": "Ready", "status": "False"}]}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "ip-1", "labels": labels}, "status": ready}
        ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
        failed = {"name": "node", "state": ended, "image": "x", "imageID": "", "ready": False, "restartCount": 0}
        everything = [
            job, node, pod(0, "Running", "ip-1", attempt=1), pod(1, "Pending", attempt=1, **unschedulable(TAINT)),
            pod(2, "Failed", "ip-1", attempt=1, containerStatuses=[failed]), pod(0, "Failed", "ip-1"),
        ]  # fmt: skip
        try:
            made = kubectl("create", "-f", "-", text=yaml.safe_dump_all([job]))
            assert made.returncode == 0, made.stderr
            assert "no pods: Trainer has not seen the job yet" in aliquot("status", "llama3-8b").stdout
            assert "has no pods" in aliquot("logs", "llama3-8b").stderr
            made = kubectl("create", "-f", "-", text=yaml.safe_dump_all(everything[1:]))
            assert made.returncode == 0, made.stderr
            result = aliquot("status", "llama3-8b")
            assert result.returncode == 0, result.stderr
            lines = result.stdout.splitlines()
            assert lines[0] == "TrainJob default/llama3-8b: not finished; 1 of 3 pods run"  # of the newest attempt
            assert lines[1].endswith("Running  on ip-1 (r7i.8xlarge, spot, not ready)")
            assert "Pending  nodes have the taint intel.com/amx: present" in lines[2]
            assert lines[3].endswith("exit code 137: killed, most often for memory")
        finally:
            kubectl("delete", "--ignore-not-found", "-f", "-", text=yaml.safe_dump_all(everything))
