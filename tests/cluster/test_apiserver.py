"""Server-side dry runs against a real Kubernetes API server: everything rendered, good and deliberately bad."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aliquot.cluster.check import check_manifests
from aliquot.cluster.kind_schemas import KindSchema, is_core, read_crds, supported
from aliquot.cluster.live_cluster import ask_cluster
from aliquot.cluster.manifests import ManifestObject, parse_manifests, to_yaml
from aliquot.cluster.render import documents, render, write
from tests.cluster.apiserver import NEEDS_SERVER, Server, crd_folders, kubectl
from tests.cluster.cases import cpu_job
from tests.cluster.crd import TRAINERS
from tests.cluster.mutants import mutants
from tests.cluster.test_schemas import CASES, job_of

pytestmark = NEEDS_SERVER


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


def test_two_sizes_in_one_string_pass_the_server(trainer: str) -> None:
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


MUTANTS = 500  # of each version of Trainer
# What decides whether an object is taken, as opposed to whether its job would run.
OF_THE_SERVER = {"unknown-field", "malformed", "missing-field", "field-value", "cel-rule", "unknown-kind"}
# Where the servers and the check may differ, and why.
REASONS = {
    r"^PersistentVolumeClaim \.spec\.dataSource": "1.20 drops one that it does not support, and knows no dataSourceRef;"
    " later versions require kind and name",
    r"^PersistentVolume \.spec\.csi\.nodeExpandSecretRef": "1.20 does not know it; later versions require its names",
    r"(\] = None|= \[None\])$": "Kubernetes' own kinds read a null in a list as an empty text, which nobody means",
}


def test_mutants_are_judged_as_the_server_does(trainer: str) -> None:
    """Good objects of every kind that is rendered or named, each spoiled in one place at random.

    The server has Kubernetes' own types without the code that validates them: where it takes an object of a core kind
    that the check refuses, Kubernetes 1.20's own server, started by $APISERVER_UP where $APISERVER_CORE120 is 1, says
    who is right; without it these are not counted. What its own
    schema of a patch does not know is newer than it, and no refusal.
    """
    crds = [each for folder in crd_folders(trainer) for each in read_crds(folder)]
    servers = [Server(Path(os.environ["KUBECONFIG"]))]
    old = Path(f"{os.environ['KUBECONFIG']}-core120")
    if os.environ.get("APISERVER_CORE120") == "1" and old.is_file():
        servers.append(Server(old))
    good = good_objects(trainer)
    for document in good:
        assert servers[0].refusal(document) is None
        assert found_in(document, crds) == []
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for mutant in mutants(good, [*crds, *supported()], MUTANTS, seed=int(trainer[-1])):
        core = is_core(mutant.document["apiVersion"].rpartition("/")[0])
        says, found = servers[0].refusal(mutant.document), found_in(mutant.document, crds)
        if says is None and core and len(servers) > 1:
            says = servers[1].refusal(mutant.document)
            says = None if says is not None and "failed to create typed patch" in says else says
        if (says is None) == (not found):
            counts["agreed"] += 1
        elif any(re.search(place, mutant.what) for place in REASONS):
            counts["differed for a reason"] += 1
        elif core and found and len(servers) == 1:
            counts["not judged by this server"] += 1
        else:
            wrong.append(f"{mutant.what}: the server says {says}, the check {found}")
    print(f"Trainer {trainer}: {dict(counts)}, {len(wrong)} wrong")
    assert wrong == []
    judged = MUTANTS - counts["not judged by this server"]
    assert judged > 0.88 * MUTANTS
    assert counts["agreed"] >= 0.99 * judged


def good_objects(trainer: str) -> list[dict[str, Any]]:
    """Of every case of a render, and of the kinds that a job only names."""
    found = [each for case in CASES for each in documents(job_of(case, trainer)).values()]
    found = [each for each in found if each["metadata"].get("namespace") != "training"]  # does not exist there
    # Kubernetes' own code asks more of these than their schemas; the check does not repeat it (docs/tutorials/eks.md).
    found = [each for each in found if each["kind"] not in ("Job", "NetworkPolicy")]
    runtime = documents(cpu_job(trainer=trainer))["training-runtime.yaml"]
    job_set = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "x"}}
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "x"}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}, "type": "Opaque"}
    return [
        *found,
        {**job_set, "spec": runtime["spec"]["template"]["spec"]},
        {**queue, "spec": {"clusterQueue": "training"}},
        {**secret, "data": {"token": "YQ=="}, "stringData": {"other": "x"}},
    ]


def found_in(document: dict[str, Any], crds: list[KindSchema]) -> list[str]:
    findings = check_manifests([ManifestObject(document, "x")], crds=crds)
    return [f"{each.message} [{each.rule}]" for each in findings if each.rule in OF_THE_SERVER]
