"""Write the Job that makes the directories of a run as root, and the init containers that wait for them.

Only the pod of this Job runs as root, so that the training pods pass Pod Security `restricted`.
"""

from __future__ import annotations

import hashlib
import json

from aliquot.cluster import pod
from aliquot.cluster.job import Job
from aliquot.cluster.manifest_yaml import Document, literal
from aliquot.cluster.node_manifests import labels
from aliquot.cluster.pod_config import directories

_PROGRAM = ["python3", "-P", "-m", "aliquot.cluster.make_directories"]
_WAIT_S = 900  # the Job may need a new node, which pulls the image
_KEEP_S = 86400  # a finished Job stays so long for its log


def directory_job(job: Job, any_run: bool = False) -> Document | None:
    """Write the Job; None for an existing claim, whose owner makes the directories.

    A Job cannot be changed, so its name holds a digest of its spec: a different render makes a new Job.

    Args:
        any_run: make directories for runs of other jobs, too.
    """
    if job.section.storage.kind == "claim":
        return None
    mount = job.section.storage.mount_path
    paths = [literal(path) for path in (mount, *directories(job, any_run))]
    spec = {
        "backoffLimit": 3,
        "ttlSecondsAfterFinished": _KEEP_S,
        "template": {
            "metadata": {"labels": labels(job)},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                # Any node of the image's architecture can run the Job, also a node of the training job.
                "nodeSelector": {"kubernetes.io/arch": job.types[0].arch, "kubernetes.io/os": "linux"},
                "tolerations": pod.tolerations(job),
                "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [
                    {
                        **_container(job, [*_PROGRAM, "own", str(pod.USER), *paths]),
                        "securityContext": {
                            "runAsUser": 0,
                            "runAsGroup": 0,
                            "readOnlyRootFilesystem": True,
                            "allowPrivilegeEscalation": False,
                            # DAC_OVERRIDE: parents may belong to the trainer.
                            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE"]},
                        },
                    }
                ],
                "volumes": [pod.shared_volume(job)],
            },
        },
    }
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:6]
    metadata = {"name": f"{job.name}-dirs-{digest}", "namespace": job.section.namespace, "labels": labels(job)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def wait_containers(job: Job, any_run: bool = False) -> list[Document]:
    """Write the init container of a training pod that waits for the directories; none for an existing claim."""
    if job.section.storage.kind == "claim":
        return []
    paths = [literal(path) for path in directories(job, any_run)]
    container = _container(job, [*_PROGRAM, "await", str(_WAIT_S), *paths])
    return [{**container, "securityContext": pod.container_security()}]


def _container(job: Job, command: list[str]) -> Document:
    return {
        "name": "directories",
        "image": job.section.image,
        "imagePullPolicy": job.section.image_pull_policy,
        "command": command,
        "resources": {name: {"cpu": "250m", "memory": "256Mi"} for name in ("requests", "limits")},
        "volumeMounts": [pod.shared_mount(job)],
    }
