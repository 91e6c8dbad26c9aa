"""`aliquot cluster status` and `logs`: a job's pods in words, by recorded answers and against an API server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from aliquot.cluster.job_status import job_pods, why_waiting
from aliquot.cluster.render import documents
from tests.cluster.apiserver import NEEDS_SERVER, kubectl
from tests.cluster.cases import cpu_job

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
