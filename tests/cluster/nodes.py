"""Nodes of a cluster on this machine: network namespaces on one switch, each with a pod's own view of files and names.

A pod runs in its node's network and in a mount namespace of its own, where its ConfigMap lies at /etc/aliquot, the
shared directory where the manifest mounts the claim, and /etc/hosts knows the names that the cluster's DNS would.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aliquot.cluster.job import Job, describe
from aliquot.cluster.pod import CONFIG_DIRECTORY, NODE
from aliquot.cluster.render import documents
from aliquot.config.read_config import read_config
from aliquot.planner.plan import PhaseMemory
from tests.cluster.cases import cluster_section, plan
from tests.multinode.namespaces import Host
from tests.runs import write_config

PORT = 29400  # that Trainer gives

# Everything below /mnt and /etc is the pod's own; the rest of the machine is as it is.
_POD = """
set -eu
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work /etc
mkdir -p /etc/aliquot "$MOUNT_PATH"
cp "$POD_FILES"/hosts /etc/hosts
mount --bind "$POD_FILES"/config /etc/aliquot
mount --bind "$SHARED" "$MOUNT_PATH"
unset MOUNT_PATH POD_FILES SHARED
cd /
exec "$@"
"""


def small_job(shared: Path, name: str, nodes: int, sections: dict[str, Any], **rates: float) -> Job:
    """A run in `shared`, which its pods mount, on nodes with a rank each. `rates`: what the plan expects of them."""
    file = write_config(shared, name, **sections)
    values = yaml.safe_load(file.read_text())
    values["run"]["directory"] = f"runs/{name}"
    values["data"]["path"] = "/mnt/fsx/text.txt"  # where the pods see it
    values["cluster"] = cluster_section(nodes=nodes, instance_types=["r7i.large"], huggingface_secret=None)
    values["cluster"]["storage"]["mount_path"] = "/mnt/fsx"
    file.write_text(yaml.safe_dump(values))
    phases = (PhaseMemory("steady peak", {"all": 1}, {}),)
    foreseen = plan(nodes=nodes, ranks_per_node=1, threads_per_rank=1, instance="r7i.large", phases=phases, **rates)
    return describe(read_config(file), foreseen)


@dataclass
class Pod:
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """As when the machine is gone: every process of the pod at once."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def ended(self, timeout_s: float) -> tuple[int, str]:
        """Its exit code, as the kubelet reports it, and its log."""
        code = self.process.wait(timeout_s)
        return (128 - code if code < 0 else code), self.log.read_text()


@dataclass
class Cluster:
    """Runs the pods of a rendered job as the controllers would."""

    job: Job
    hosts: list[Host]
    files: Path  # what the pods see of the API server: config and names
    shared: Path

    def __post_init__(self) -> None:
        self.pods: list[Pod] = []
        found = documents(self.job)
        self.train_job, self.runtime = found["train-job.yaml"]["spec"], found["training-runtime.yaml"]["spec"]
        (self.files / "config").mkdir(parents=True)
        (self.maker,) = found["directories-job.yaml"]["spec"]["template"]["spec"]["containers"]
        for name, text in found["config-map.yaml"]["data"].items():
            (self.files / "config" / name).write_text(text)
        names = [f"{host.address} {self.job.name}-{NODE}-0-{n}.{self.job.name}" for n, host in enumerate(self.hosts)]
        (self.files / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(names) + "\n")
        (mount,) = (each for each in self._pod_spec()["containers"][0]["volumeMounts"] if each["name"] == "shared")
        self.mount_path = mount["mountPath"]
        assert CONFIG_DIRECTORY == "/etc/aliquot"

    def start(self) -> list[Pod]:
        """The Job that makes the directories, then all pods: init containers, then a container in its own group."""
        subprocess.run(self._inside(self.hosts[0], self.maker["command"]), env=self._outer({}), check=True)
        self.pods = [self._pod(number, host) for number, host in enumerate(self.hosts)]
        return self.pods

    def stop(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.kill()

    def decision(self, exit_codes: list[int]) -> str:
        """What JobSet does when the pods ended so, by the rules of the runtime: an action of its failure policy."""
        policy = self._job_spec()["podFailurePolicy"]["rules"]
        messages = []
        for index, rule in enumerate(policy):
            wanted = rule.get("onExitCodes", {}).get("values", [])
            messages += [
                f"Container node for pod default/x failed with exit code {code} matching FailJob rule at index {index}"
                for code in exit_codes
                if code in wanted
            ]
        reason = "PodFailurePolicy" if messages else "BackoffLimitExceeded"
        for rule in self.runtime["template"]["spec"]["failurePolicy"]["rules"]:
            patterns = rule.get("onJobFailureMessagePatterns", [""])
            fits = any(re.search(pattern, message) for pattern in patterns for message in messages[:1] or [""])
            if reason in rule["onJobFailureReasons"] and fits:
                return rule["action"]
        return "RestartJobSet"

    def _job_spec(self) -> dict[str, Any]:
        (replicated,) = self.runtime["template"]["spec"]["replicatedJobs"]
        return replicated["template"]["spec"]

    def _pod_spec(self) -> dict[str, Any]:
        (patch,) = self.train_job["runtimePatches"]
        (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return replicated["template"]["spec"]["template"]["spec"]

    def _pod(self, number: int, host: Host) -> Pod:
        for container in self._job_spec()["template"]["spec"].get("initContainers", []):
            subprocess.run(self._inside(host, container["command"]), env=self._outer({}), check=True)
        trainer = self.train_job["trainer"]
        given = {each["name"]: each["value"].replace("$$", "$") for each in trainer["env"] if "value" in each}
        # What the controller adds, as Trainer's torch plugin does.
        given |= {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": f"{self.job.name}-{NODE}-0-0.{self.job.name}",
            "PET_MASTER_PORT": str(PORT),
        }
        log = self.files / f"pod-{number}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                self._inside(host, trainer["command"]), env=self._outer(given), start_new_session=True,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return Pod(process, log)

    def _inside(self, host: Host, command: list[str]) -> list[str]:
        return host.command("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _POD,
                            "pod", *command)  # fmt: skip

    def _outer(self, environment: dict[str, str]) -> dict[str, str]:
        """The image is this machine: its aliquot is the one under test."""
        return {
            **environment,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"),
            "MOUNT_PATH": self.mount_path,
            "POD_FILES": str(self.files),
            "SHARED": str(self.shared),
        }
