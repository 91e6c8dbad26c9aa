"""Server-side dry runs against a real Kubernetes API server: everything rendered, good and deliberately bad.

$APISERVER_UP (default ../shared/tools/apiserver-up.sh) builds and starts one on loopback and prints its kubeconfig; the
first time takes minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aliquot.cluster.live_cluster import ask_cluster
from aliquot.cluster.manifest_yaml import to_yaml
from aliquot.cluster.manifests import parse_manifests
from aliquot.cluster.render import documents, render, write
from tests.cluster.cases import cpu_job
from tests.cluster.crd import CRDS, TRAINERS
from tests.cluster.test_schemas import CASES, job_of
from tests.conftest import REPOSITORY

UP = (REPOSITORY / os.environ.get("APISERVER_UP", "../shared/tools/apiserver-up.sh")).resolve()

pytestmark = [
    pytest.mark.long,
    pytest.mark.apiserver,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not UP.is_file(), reason="needs $APISERVER_UP, which starts a Kubernetes API server"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl"),
    pytest.mark.skipif(not CRDS.is_dir(), reason="needs ../shared/crds (not part of the repository)"),
]


@pytest.fixture(scope="module", params=TRAINERS)
def trainer(request: pytest.FixtureRequest) -> Iterator[str]:
    """The version of Kubeflow Trainer whose CRDs the server has; KUBECONFIG points to it."""
    folders = [CRDS / "karpenter-aws-v1.14.1", CRDS / f"trainer-v{request.param}.0"]
    started = subprocess.run([str(UP), *map(str, folders)], capture_output=True, text=True, check=False, timeout=1500)
    assert started.returncode == 0, started.stderr
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = started.stdout.strip().splitlines()[-1]
    kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
    yield request.param
    os.environ.pop("KUBECONFIG")
    if before is not None:
        os.environ["KUBECONFIG"] = before
    down = UP.with_name("apiserver-down.sh")
    if down.is_file() and request.param == TRAINERS[-1]:
        subprocess.run([str(down)], check=False, capture_output=True, timeout=60)


def kubectl(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubectl", *map(str, arguments)], input=text, capture_output=True, text=True, check=False, timeout=120
    )


def dry_run(document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", text=to_yaml(document))


@pytest.mark.parametrize("case", CASES)
def test_everything_is_taken(trainer: str, case: str, tmp_path: Path) -> None:
    job = job_of(case, trainer)
    files = render(job, "0.1.0")
    write(files, tmp_path)
    if job.section.create_namespace:  # a dry run makes none, so what lies in it would be refused
        kubectl("create", "namespace", job.section.namespace)
    result = kubectl("apply", "--server-side", "--dry-run=server", "-k", tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(files) - 1


@pytest.mark.parametrize(
    "file, change, says",
    [
        ("node-pool.yaml", lambda spec: spec.update(limit={}), "limit"),
        ("node-pool.yaml", lambda spec: spec["template"]["spec"]["requirements"][0].update(values=[]), "In"),
        ("node-class.yaml", lambda spec: spec["amiSelectorTerms"].append({"id": "ami-1"}), "alias"),
        ("persistent-volume-claim.yaml", lambda spec: spec.update(accessMode="ReadWriteMany"), "accessMode"),
        ("training-runtime.yaml", lambda spec: spec["template"]["spec"]["failurePolicy"].update(maxRestart=1), "maxR"),
        ("train-job.yaml", lambda spec: spec["trainer"].update(numNodes="four"), "numNodes"),
        ("train-job.yaml", lambda spec: spec["trainer"].update(nodes=4), "nodes"),
    ],
)
def test_mistakes_are_refused(trainer: str, file: str, change: Any, says: str) -> None:
    document = documents(cpu_job(trainer=trainer))[file]
    change(document["spec"])
    result = dry_run(document)
    assert result.returncode != 0 and says in result.stderr, result.stdout + result.stderr


def test_the_other_dialect_is_refused(trainer: str) -> None:
    (other,) = set(TRAINERS) - {trainer}
    assert dry_run(documents(cpu_job(trainer=other))["train-job.yaml"]).returncode != 0


def test_what_passes_the_server_and_never_runs(trainer: str) -> None:
    """The reason for `cluster check`: the server takes two sizes in one string."""
    document = documents(cpu_job(trainer=trainer))["node-pool.yaml"]
    document["spec"]["template"]["spec"]["requirements"][3]["values"] = ["r7i.8xlarge, r7i.16xlarge"]
    assert dry_run(document).returncode == 0


def test_live(trainer: str) -> None:
    job = cpu_job(trainer=trainer)
    documents_of = {name: each for name, each in documents(job).items() if name != "node-class.yaml"}  # no account here
    documents_of["train-job.yaml"]["spec"]["trainer"]["unknown"] = 1
    manifests = [one for name, each in documents_of.items() for one in parse_manifests(to_yaml(each), name)]
    found = {each.rule: each for each in ask_cluster(manifests, job)}
    assert set(found) == {"secret", "refused-by-server"}
    assert "Secret default/hf-token does not exist" in found["secret"].message
    assert "unknown" in found["refused-by-server"].message
