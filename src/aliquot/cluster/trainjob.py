"""Write Kubeflow Trainer's TrainJob and the TrainingRuntime that it refers to.

The runtime holds what neither dialect of a TrainJob can express: restarts, exit codes, and the container that waits for
the directories. Each job has a runtime of its own in its namespace.
"""

from __future__ import annotations

from aliquot.cluster import pod
from aliquot.cluster.directory_job import wait_containers
from aliquot.cluster.job import EFA, GPU, LOGS_BYTES, Job
from aliquot.cluster.manifest_yaml import Document, compact
from aliquot.cluster.node_manifests import labels
from aliquot.cluster.quantity import mebibytes

NODE = "node"  # the name of the job and the container that Trainer requires
_API = "trainer.kubeflow.org/v1alpha1"
_MANAGER = "aliquot.io/render"
_ANCESTOR = {pod.ANCESTOR: "trainer"}
_FRAMEWORK = {"trainer.kubeflow.org/framework": "torch"}

# Exit codes of the trainer: aliquot.core.errors and aliquot.distributed.signals.
_BAD_INPUT, _STOPPED = 2, 143
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds; torchrun runs the SDK's function
_BEFORE_KUBELET_S = 20  # torchrun ends its ranks so long before the kubelet kills the pod


def train_job(job: Job) -> Document:
    queue = {"kueue.x-k8s.io/queue-name": job.section.queue} if job.section.queue else {}
    return {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": {"name": job.name, "namespace": job.section.namespace, "labels": {**labels(job), **queue}},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "image": job.section.image,
                "command": pod.command(),
                "numNodes": job.plan.nodes,
                # Never "auto": on a CPU node that means one process per CPU.
                "numProcPerNode": job.plan.ranks_per_node,
                "env": pod.environment(job),
                "resourcesPerNode": {"requests": resources(job), "limits": resources(job)},
            },
            **(_overrides(job) if old_dialect(job) else _patches(job)),
        },
    }


def training_runtime(job: Job) -> Document:
    pod_spec = compact(
        restartPolicy="Never",  # JobSet restarts all nodes, because a single rank cannot rejoin its peers
        terminationGracePeriodSeconds=job.grace_s if old_dialect(job) else None,
        securityContext=pod.pod_security() if old_dialect(job) else None,
        automountServiceAccountToken=False,  # an IAM role and Trainer's status have separate tokens
        initContainers=wait_containers(job),
        containers=[
            {
                "name": NODE,
                "image": job.section.image,
                "imagePullPolicy": job.section.image_pull_policy,
                "securityContext": pod.container_security(),
            }
        ],
        volumes=[pod.shared_volume(job)] if wait_containers(job) else None,
    )
    return {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "namespace": job.section.namespace, "labels": {**labels(job), **_FRAMEWORK}},
        "spec": {
            "mlPolicy": {"numNodes": job.plan.nodes, "torch": {}},
            "template": {"spec": _job_set(job, pod_spec, _ANCESTOR, elastic=job.section.is_elastic)},
        },
    }


def cluster_training_runtime(job: Job) -> Document:
    """Write `aliquot-cpu` or `aliquot-gpu`: a runtime for TrainJobs of other people or of the Kubeflow SDK.

    It holds everything except the command and its config. Nodes, storage and resources are those of `job`; the number
    of nodes is fixed, because torchrun needs it.
    """
    # Later versions take the number from the TrainJob; the default is one per GPU, or else one per requested CPU.
    processes = {"numProcPerNode": job.plan.ranks_per_node} if old_dialect(job) else {}
    requests = limits = resources(job)
    if not processes and not job.gpus:
        requests = {**limits, "cpu": "1"}  # taint and memory reserve the node for one pod, which may use all CPUs
    pod_spec = compact(
        restartPolicy="Never",
        terminationGracePeriodSeconds=job.grace_s,
        securityContext=pod.pod_security(),
        nodeSelector=pod.node_selector(job),
        tolerations=pod.tolerations(job),
        affinity=pod.affinity(job, any_job=True),
        serviceAccountName=job.section.service_account,
        automountServiceAccountToken=False,
        initContainers=wait_containers(job, any_run=True),
        containers=[
            {
                "name": NODE,
                "image": job.section.image,
                "imagePullPolicy": job.section.image_pull_policy,
                "workingDir": "/tmp",  # the SDK writes its script here, and any user may write
                "env": [
                    *pod.environment(job),
                    {"name": _SHUTDOWN_TIMEOUT, "value": str(job.grace_s - _BEFORE_KUBELET_S)},
                ],
                "resources": {"requests": requests, "limits": limits},
                "securityContext": pod.container_security(),
                "volumeMounts": pod.volume_mounts(job, with_config=False),
            }
        ],
        volumes=pod.volumes(job, with_config=False),
    )
    return {
        "apiVersion": _API,
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": f"aliquot-{'gpu' if job.gpu_nodes else 'cpu'}", "labels": {**labels(job), **_FRAMEWORK}},
        "spec": {
            "mlPolicy": {"numNodes": job.plan.nodes, "torch": processes},
            "template": {"spec": _job_set(job, pod_spec, pod.runtime_labels(job), elastic=False)},
        },
    }


def _job_set(job: Job, pod_spec: Document, pod_labels: dict[str, str], elastic: bool) -> Document:
    return {
        "failurePolicy": _failure_policy_one_by_one() if elastic else _failure_policy(job),
        "replicatedJobs": [
            {
                "name": NODE,
                "template": {
                    "metadata": {"labels": _ANCESTOR},
                    "spec": {
                        **(_one_by_one(job) if elastic else _all_together()),
                        "template": {"metadata": {"labels": pod_labels}, "spec": pod_spec},
                    },
                },
            }
        ],
    }


def resources(job: Job) -> dict[str, str]:
    """Return the requests and equal limits of a pod, so that it has the planned resources and is evicted last."""
    amounts = {"cpu": str(job.cpus), "memory": mebibytes(job.memory_bytes)}
    if job.scratch_bytes:
        amounts["ephemeral-storage"] = mebibytes(job.scratch_bytes + LOGS_BYTES)
    if job.gpus:
        amounts[GPU] = str(job.gpus)
    if job.efa_interfaces:
        amounts[EFA] = str(job.efa_interfaces)
    return amounts


def old_dialect(job: Job) -> bool:
    return job.section.trainer == "2.1"


def _patches(job: Job) -> Document:
    """Write the pod fields for Trainer 2.2 and later."""
    spec = _pod(job, terminationGracePeriodSeconds=job.grace_s, securityContext=pod.pod_security())
    replicated = {"name": NODE, "template": {"spec": {"template": {"spec": spec}}}}
    return {
        "runtimePatches": [
            {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}}}
        ]
    }


def _overrides(job: Job) -> Document:
    """Write the pod fields for Trainer 2.1, which supports neither a grace period nor a security context here."""
    return {"podTemplateOverrides": [{"targetJobs": [{"name": NODE}], "spec": _pod(job)}]}


def _pod(job: Job, **fields: object) -> Document:
    """Write the pod fields of both dialects; `fields` go before the volumes."""
    return compact(
        nodeSelector=pod.node_selector(job),
        tolerations=pod.tolerations(job),
        affinity=pod.affinity(job),
        serviceAccountName=job.section.service_account,
        **fields,
        volumes=pod.volumes(job),
        containers=[{"name": NODE, "volumeMounts": pod.volume_mounts(job)}],
    )


def _all_together() -> Document:
    """End the Job with the first failed pod, with a reason that identifies the case of `_failure_policy`."""
    return {
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [_STOPPED]}},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [_BAD_INPUT]}},
            ]
        },
    }


def _one_by_one(job: Job) -> Document:
    """Replace a pod that is lost or receives SIGTERM, while the other pods continue without it.

    All pods finish at the same time. The first finished pod ends the Job, so that no replacement starts without work.
    """
    return {
        "backoffLimit": job.section.max_restarts * job.section.most_nodes,  # a crash ends the run on all nodes
        "podReplacementPolicy": "Failed",  # not before the old pod has saved
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [_STOPPED]}},
                {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [_BAD_INPUT]}},
            ]
        },
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }


def _failure_policy_one_by_one() -> Document:
    """Leave all restarts to the Job."""
    return {"maxRestarts": 0}


def _failure_policy(job: Job) -> Document:
    """Restart all nodes together from the newest checkpoint; fail at once for bad input.

    A restart after a spot reclaim or a drain does not count, because the node has saved. The patterns match the Job
    controller's message, for example "... failed with exit code 143 matching FailJob rule at index 0".
    """
    reason = {"onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "maxRestarts": job.section.max_restarts,
        "rules": [
            {
                "name": "stopped",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                **reason,
                "onJobFailureMessagePatterns": [f"exit code {_STOPPED} ", "condition DisruptionTarget "],
            },
            {"name": "badInput", "action": "FailJobSet", **reason},
        ],
    }
