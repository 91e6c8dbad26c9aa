"""What a rendered pod may do, who may reach it, and what the images are built from.

States on disk: room for them is asked for, on the machine's own disks if it has some.

No value of a config can become anything but a value: not a key, a document, a tag, a comment's end, a variable.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from aliquot.cluster.check import check_manifests
from aliquot.cluster.job import Job, describe
from aliquot.cluster.job_view import job_views
from aliquot.cluster.manifests import parse_manifests, to_yaml
from aliquot.cluster.pod import ANCESTOR, CONFIG_FILE, shipped_config
from aliquot.cluster.render import documents, parsed, render
from aliquot.cluster.rules_config import _shipped_extras
from aliquot.cluster.rules_security import restricted_violations
from aliquot.config.read_config import read_config
from aliquot.core.errors import ClusterError
from aliquot.planner.plan import PhaseMemory
from tests.cluster.cases import GIB, cluster_section, config, cpu_job, disk_job, gpu_job, plan
from tests.cluster.crd import TRAINERS
from tests.cluster.test_schemas import CASES, job_of
from tests.conftest import REPOSITORY
from tests.examples import examples

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
        view.pod,
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
    return pod["containers"][0]["securityContext"]


LAPSES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "hostNetwork": lambda pod: pod.update(hostNetwork=True),
    "volumes[3] is": lambda pod: pod["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    "sysctl 'kernel.msgmax'": lambda pod: pod["securityContext"].update(sysctls=[{"name": "kernel.msgmax"}]),
    "container node: runAsNonRoot": lambda pod: pod["securityContext"].pop("runAsNonRoot"),
    "container node: runAsUser is 0": lambda pod: container(pod).update(runAsUser=0),
    "container node: allowPrivilegeEscalation": lambda pod: container(pod).pop("allowPrivilegeEscalation"),
    "container node: privileged": lambda pod: container(pod).update(privileged=True),
    "container node: seccompProfile": lambda pod: container(pod).update(seccompProfile={"type": "Unconfined"}),
    "container node: capabilities do not drop": lambda pod: container(pod).update(capabilities={"drop": ["CHOWN"]}),
    "container node: capabilities add 'IPC_LOCK'": lambda pod: container(pod)["capabilities"].update(add=["IPC_LOCK"]),
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
    assert "['cuda']" in text and "deepspeed" in _shipped_extras()["cuda"]
    release = re.search(r"^ARG EFA_INSTALLER=(\d+)\.(\d+)\.", text, re.MULTILINE)
    assert release is not None and (int(release[1]), int(release[2])) >= (1, 47)
    path = re.search(r"LD_LIBRARY_PATH=(\S+)", text)
    assert path is not None
    for directory in ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/efa/lib"):
        assert {directory, f"{directory}/x86_64-linux-gnu"} <= set(path[1].split(":"))
    opened = text.index("CDLL('libnccl-net-ofi.so')")
    assert text.index("torch==") < text.index("/opt/cudart/libcudart.so") < opened < text.index("USER 1000")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_image_inputs_are_verified(name: str) -> None:
    text = re.sub(r"\\\n", " ", (REPOSITORY / "deploy" / name).read_text())
    assert "pypi.org" not in text, "a package index has one name, which a user may replace"
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


def found(job: Any, kind: str) -> Any:
    return next(each for each in documents(job).values() if each["kind"] == kind)


def told(value: Any, key: str) -> list[Any]:
    """All values under `key`, wherever they stand."""
    if isinstance(value, list):
        return [each for item in value for each in told(item, key)]
    if not isinstance(value, dict):
        return []
    return [*([value[key]] if key in value else []), *(each for item in value.values() for each in told(item, key))]


@pytest.mark.parametrize("trainer", ["2.1", "2.3"])
def test_room_is_asked_for(trainer: str) -> None:
    job = disk_job(trainer=trainer)
    assert found(job, "EC2NodeClass")["spec"]["instanceStorePolicy"] == "RAID0"
    every = list(documents(job).values())
    assert set(told(every, "ephemeral-storage")) == {"64717Mi"}  # 60 GiB, a fiftieth more, and 2 GiB for logs
    assert {"name": "offload", "emptyDir": {"sizeLimit": "62669Mi"}} in chain(*told(every, "volumes"))
    assert {"name": "offload", "mountPath": "/offload"} in chain(*told(every, "volumeMounts"))
    shipped = yaml.safe_load(found(job, "ConfigMap")["data"]["config.yaml"])
    assert shipped["shard"] == {"offload": "disk", "engine": "host", "offload_directory": "/offload"}


def test_scratch_lies_on_the_volume_without_local_disks() -> None:
    job = disk_job(instance_types=["r7i.8xlarge"], volume_gib=200)
    spec = found(job, "EC2NodeClass")["spec"]
    assert "instanceStorePolicy" not in spec
    assert spec["blockDeviceMappings"][0]["ebs"].items() >= {"throughput": 1000, "iops": 4000}.items()
    with pytest.raises(ClusterError, match=r"puts 61 GiB on each node, and cluster\.volume_gib leaves 14 GiB"):
        disk_job(instance_types=["r7i.8xlarge"], volume_gib=50)
    with pytest.raises(
        ClusterError, match=r"puts 2040 GiB on each node, and the disks of r6id\.8xlarge leave 1582 GiB"
    ):
        disk_job(scratch_gib=2000)


NASTY = [
    "'", '"', "`", "\n", "\r\n", "\u2028", "\x85", "$(HF_TOKEN)", "$$(HF_TOKEN)", "${HOME}", "$(rm -rf /)", "---",
    "\n---\nkind: Pod", "!!python/object/apply:os.system [id]", "!!int 3", "&a", "*a", "<<: *a", "{{ .Values }}",
    "# no comment", " #", ": ", "? ", "- ", "|", ">", "%YAML 1.1", "@", "~", "null", "yes", "y", "0o17", "1e3",
    "0x1f", "1_000", "12:30:00", ".inf", "=", "2026-01-01", "\ttab", " leading", "trailing ", "\x00", "\x1b[31m",
    "\ufeff", "\U0001f600", "a\n  b: c", "a\n\n\nb\n", "\n\n", "\\", "\\n",
]  # fmt: skip
pieces = st.one_of(st.sampled_from(NASTY), st.text(max_size=12))
# NUL is no part of any: no file, argument or variable can hold it, and a configuration with it is refused.
texts = st.lists(pieces, min_size=1, max_size=4).map(lambda found: "".join(found).replace("\x00", "")).filter(bool)
# Of a path: what a file may be called; the config refuses control characters and `:` in a mount, and expands `~`.
names = texts.map(lambda text: re.sub(r"^[\x00-\x1f\x7f:/~]+|[\x00-\x1f\x7f:/]", "", text)).filter(
    lambda text: text not in ("", ".", "..")
)
words = texts.map(lambda text: re.sub(r"\s", "", text)).filter(bool)


def nasty_job(text: str, name: str, word: str) -> Job:
    section = cluster_section(image=word, discovery=(text[:200] or "x"), user_data=text)
    section["storage"]["mount_path"] = f"/{name}"
    values = config(
        section,
        run={"name": "x", "directory": name},
        model={"config": {"model_type": text, text: {text: [text]}}},
        data={"path": text, "text_field": text, "cache_directory": name},
        observe={"sample_prompt": text},
    )
    return describe(values, plan(model=text, phases=(PhaseMemory(text, {text: GIB}, {}),)))


def test_nul_comes_into_no_manifest() -> None:
    for text, name, word in (("a\x00", "a", "a"), ("a", "a\x00", "a"), ("a", "a", "a\x00")):
        with pytest.raises(ValidationError, match=r"has characters that no text file can hold|should match pattern"):
            nasty_job(text, name, word)


def expanded(text: str, environment: dict[str, str]) -> str:
    """What the kubelet makes of a command's argument (k8s.io/kubernetes/third_party/forked/golang/expansion)."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda match: "$" if match.group() == "$$" else environment.get(match.group(1), match.group()),
        text,
    )


def shape(value: Any) -> Any:
    """Keys and types, without the scalars."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__


BASELINE = {name: shape(document) for name, document in documents(nasty_job("text", "name", "word")).items()}


@settings(max_examples=examples(80))
@given(text=texts, name=names, word=words)
def test_values_stay_values(text: str, name: str, word: str) -> None:
    job = nasty_job(text, name, word)
    made, files = documents(job), render(job, "0.1.0")
    assert {key: shape(value) for key, value in made.items()} == BASELINE
    for key, document in made.items():
        (read,) = yaml.safe_load_all(files[key])
        assert read == document
        body = files[key].split("\napiVersion:", 1)[0]
        assert all(line.startswith("#") for line in body.splitlines()), "the header ends nowhere but at its end"
    init = made["training-runtime.yaml"]["spec"]["template"]["spec"]["replicatedJobs"][0]
    command = init["template"]["spec"]["template"]["spec"]["initContainers"][0]["command"]
    paths = [f"/{name}/{name}", f"/{name}/{name}"]
    assert [expanded(each, {"HF_TOKEN": "secret"}) for each in command[6:]] == paths
    (maker,) = made["directories-job.yaml"]["spec"]["template"]["spec"]["containers"]
    assert [expanded(each, {"HF_TOKEN": "secret"}) for each in maker["command"][6:]] == [f"/{name}", *paths]
    assert made["node-class.yaml"]["spec"]["userData"] == text


@settings(max_examples=examples(60))
# A path that begins with ~ is read as one in a home directory.
@given(text=texts.filter(lambda text: text.strip() != "" and text[0] != "~"), name=names, word=words)
def test_pods_mount_the_given_config(text: str, name: str, word: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    job = nasty_job(text, name, word)
    shipped = documents(job)["config-map.yaml"]["data"][CONFIG_FILE]
    file = tmp_path_factory.mktemp("shipped") / "config.yaml"
    file.write_bytes(shipped.encode())
    read = read_config(file)
    assert read.model.config == {"model_type": text, text: {text: [text]}}
    assert (read.data.path, read.data.text_field, read.observe.sample_prompt) == (text, text, text)
    assert str(read.run.directory) == f"/{name}/{name}"
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"cluster"}) == shipped_config(job)


@pytest.mark.parametrize(
    "field, value",
    [
        ("image", "a b"),
        ("image", "a\nb"),
        ("zone", "us-east-1a\n"),
        ("name", "x; rm"),
        ("name", "$(X)"),
        ("namespace", "a\n---"),
        ("node_role", "a b"),
        ("ami", "al2023@latest"),
        ("instance_types", ["r7i.8xlarge, r7i.16xlarge"]),
        ("service_account", "A_b"),
        ("queue", "q'"),
        ("huggingface_secret", {"name": "x\ny"}),
        ("huggingface_secret", {"name": "x", "key": "$(Y)"}),
    ],
)
def test_names_are_names(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        config(cluster_section(**{field: value}))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectls_reader_agrees(tmp_path: Path) -> None:
    """Go's YAML reader, through which `kubectl apply -k` sends everything: every nasty string as a value."""
    kept = [text for text in NASTY if text != "\x85"]  # kustomize reads it, but writes it as a space
    data = {f"a{index}": text for index, text in enumerate(kept)}
    data |= {f"b{index}": f"first\n{text}\nlast\n" for index, text in enumerate(kept)}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "labels": {"y": "no"}}, "data": data}
    (tmp_path / "a.yaml").write_bytes(to_yaml(document).encode())
    (tmp_path / "kustomization.yaml").write_text("resources: [a.yaml]\n")
    built = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, check=False, timeout=60)
    assert built.returncode == 0, built.stderr
    # The only verb that shows as JSON what was read, without a server.
    show = ["kubectl", "label", "--local", "-f", "-", "-o", "json", "seen=yes"]
    shown = subprocess.run(show, input=built.stdout, capture_output=True, check=False, timeout=60)
    assert shown.returncode == 0, shown.stderr
    read = json.loads(shown.stdout)
    assert read["metadata"]["labels"] == {"y": "no", "seen": "yes"}
    assert read["data"] == data
