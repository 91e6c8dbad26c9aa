"""A Kubernetes API server on loopback, for the tests that need one.

$APISERVER_UP (default ../shared/tools/apiserver-up.sh) builds and starts one and prints its kubeconfig; the first time
takes minutes.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import ssl
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.crd import CRDS, TRAINERS
from tests.conftest import REPOSITORY

UP = (REPOSITORY / os.environ.get("APISERVER_UP", "../shared/tools/apiserver-up.sh")).resolve()

NEEDS_SERVER = [
    pytest.mark.long,
    pytest.mark.apiserver,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not UP.is_file(), reason="needs $APISERVER_UP, which starts a Kubernetes API server"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl"),
    pytest.mark.skipif(not CRDS.is_dir(), reason="needs ../shared/crds (not part of the repository)"),
]


@contextmanager
def api_server(trainer: str) -> Iterator[None]:
    """With the CRDs of this version of Kubeflow Trainer; KUBECONFIG points to it."""
    folders = crd_folders(trainer)
    started = subprocess.run([str(UP), *map(str, folders)], capture_output=True, text=True, check=False, timeout=1500)
    assert started.returncode == 0, started.stderr
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = started.stdout.strip().splitlines()[-1]
    kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
    yield
    os.environ.pop("KUBECONFIG")
    if before is not None:
        os.environ["KUBECONFIG"] = before
    down = UP.with_name("apiserver-down.sh")
    if down.is_file() and trainer == TRAINERS[-1]:
        subprocess.run([str(down)], check=False, capture_output=True, timeout=60)


def crd_folders(trainer: str) -> list[Path]:
    """What a cluster with this version of Kubeflow Trainer has."""
    job_set = {"2.1": "jobset-v0.10.1", "2.3": "jobset-v0.12.0"}[trainer]
    return [CRDS / name for name in ("karpenter-aws-v1.14.1", f"trainer-v{trainer}.0", job_set, "kueue-v0.19.2")]


def kubectl(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubectl", *map(str, arguments)], input=text, capture_output=True, text=True, check=False, timeout=120
    )


class Server:
    """One connection, by a kubeconfig with client certificates, as $APISERVER_UP writes it."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        context.load_cert_chain(user["client-certificate"], user["client-key"])
        address = urllib.parse.urlsplit(cluster["server"])
        self._connection = http.client.HTTPSConnection(str(address.hostname), address.port, context=context, timeout=60)
        self._resources: dict[str, dict[str, dict[str, Any]]] = {}

    def refusal(self, document: dict[str, Any]) -> str | None:
        """Why a server-side apply, which changes nothing, does not take `document`; None: it would."""
        api_version = document["apiVersion"]
        resource = self._resources_of(api_version).get(str(document.get("kind")))
        if resource is None:
            return f"no matches for kind {document.get('kind')}"
        space = f"namespaces/{document['metadata'].get('namespace', 'default')}/" if resource["namespaced"] else ""
        path = f"{_root(api_version)}/{space}{resource['name']}/{document['metadata']['name']}"
        query = "dryRun=All&fieldManager=test&fieldValidation=Strict&force=true"
        status, answer = self.request("PATCH", f"{path}?{query}", document, "application/apply-patch+yaml")
        return None if status in (200, 201) else str(answer.get("message"))

    def request(
        self, method: str, path: str, body: Any = None, content: str = "application/json"
    ) -> tuple[int, dict[str, Any]]:
        text = None if body is None else json.dumps(body)
        self._connection.request(method, path, text, {"Content-Type": content})
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def _resources_of(self, api_version: str) -> dict[str, dict[str, Any]]:
        if api_version not in self._resources:
            _, answer = self.request("GET", _root(api_version))
            found = answer.get("resources", [])
            self._resources[api_version] = {each["kind"]: each for each in found if "/" not in each["name"]}
        return self._resources[api_version]


def _root(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
