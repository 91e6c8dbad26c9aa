"""What the cluster says: a recorded API server that refuses, asked by the real kubectl; versions; quotas."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from aliquot.cluster import live_cluster
from aliquot.cluster.job_view import job_views
from aliquot.cluster.live_cluster import Kubectl, Refused, Versions, ask_cluster, check_versions
from aliquot.cluster.manifests import ManifestObject
from aliquot.cluster.render import parsed
from aliquot.cluster.rules_scheduling import quota_findings
from aliquot.core.errors import ClusterError
from tests.cluster.cases import cpu_job
from tests.cluster.crd import TRAINERS

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


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        parts = path.split("/")
        if path == "api":
            self._answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "apis":
            groups = [
                {"name": name, "versions": [{"groupVersion": f"{name}/{version}", "version": version}],
                 "preferredVersion": {"groupVersion": f"{name}/{version}", "version": version}}
                for name, (version, _) in _GROUPS.items()
            ]  # fmt: skip
            self._answer(200, {"kind": "APIGroupList", "groups": groups})
        elif path == "api/v1":
            self._answer(200, resources("v1", _CORE))
        elif len(parts) == 3 and parts[0] == "apis":
            self._answer(200, resources(f"{parts[1]}/{parts[2]}", _GROUPS[parts[1]][1]))
        else:
            group = parts[1] if parts[0] == "apis" else ""
            rest = parts[3:] if parts[0] == "apis" else parts[2:]
            spaced = rest[2:] if rest and rest[0] == "namespaces" else rest
            verb = "get" if len(spaced) > 1 else "list"
            name = spaced[0] if spaced else path
            message = f'{name} is forbidden: User "dev" cannot {verb} resource "{name}" in API group "{group}"'
            self._answer(403, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden",
                               "message": message, "code": 403})  # fmt: skip

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "x", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
    }  # fmt: skip
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.setenv("HOME", str(tmp_path))  # where kubectl caches what a server has
    yield
    server.shutdown()
    server.server_close()


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
    assert found.message == "4 x 31 of requests.cpu; ResourceQuota team has 100, 8 in use"
    assert list(quota_findings(view, "team", {"requests.cpu": "124"}, {})) == []


def deployment(image: str) -> dict[str, Any]:
    return {"spec": {"template": {"spec": {"containers": [{"image": image}]}}}}


def test_versions_from_images() -> None:
    found = Versions.from_deployments(
        [
            deployment("ghcr.io/kubeflow/trainer/trainer-controller-manager:v2.1.0"),
            deployment("registry.k8s.io/jobset/jobset:v0.10.1@sha256:abc"),
            deployment("public.ecr.aws/karpenter/controller:1.14.1"),
            deployment("registry.k8s.io/kueue/kueue:v0.19.2"),
            deployment("localhost:5000/kueue/other"),
        ]
    )
    assert found == Versions(trainer=(2, 1), jobset=(0, 10), karpenter=(1, 14), kueue=(0, 19))


@pytest.mark.parametrize(
    "installed, queue, rules",
    [
        (Versions((2, 3), (0, 12), (1, 14), (0, 19)), "q", []),
        (Versions((2, 3), (0, 10), (1, 14), None), None, ["versions"]),
        (Versions((2, 1), (0, 10), (1, 14), None), None, ["trainer-dialect"]),
        (Versions((2, 1), (0, 10), (1, 14), (0, 19)), "q", ["trainer-dialect", "versions"]),
        (Versions((2, 3), (0, 12), (1, 14), (0, 16)), "q", ["versions"]),
        (Versions((2, 3), (0, 12), (0, 37), None), None, ["versions"]),
        (Versions(), None, []),
    ],
)
def test_version_rules(installed: Versions, queue: str | None, rules: list[str]) -> None:
    manifests: list[ManifestObject] = parsed(cpu_job(queue=queue))
    assert [each.rule for each in check_versions(installed, manifests)] == rules


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
