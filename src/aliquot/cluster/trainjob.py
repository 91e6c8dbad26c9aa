"""Write Kubeflow Trainer's TrainJob and the TrainingRuntime that it refers to.

The runtime holds what neither dialect of a TrainJob can express: restarts, exit codes, and the container that waits for
the directories. Each job has a runtime of its own in its namespace.
"""

from __future__ import annotations

from aliquot.cluster import pod, security
from aliquot.cluster.infrastructure import wait_containers
from aliquot.cluster.job import EFA, GPU, LOGS_BYTES, Job
from aliquot.cluster.manifests import Document, compact
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
    trainer = {
        "image": job.section.image,
        "command": pod.command(),
        "numNodes": job.plan.nodes,
        # Never "auto": on a CPU node that means one process per CPU.
        "numProcPerNode": job.plan.ranks_per_node,
        "env": pod.environment(job),
        "resourcesPerNode": {"requests": _resources(job), "limits": _resources(job)},
    }
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
        "trainer": trainer,
        **(_overrides(job) if _old_dialect(job) else _patches(job)),
    }
    return job.manifest(_API, "TrainJob", labels=queue, spec=spec)


def training_runtime(job: Job) -> Document:
    pod_spec = compact(
        restartPolicy="Never",  # JobSet restarts all nodes, because a single rank cannot rejoin its peers
        terminationGracePeriodSeconds=job.grace_s if _old_dialect(job) else None,
        securityContext=security.pod_security() if _old_dialect(job) else None,
        automountServiceAccountToken=False,  # an IAM role and Trainer's status have separate tokens
        initContainers=wait_containers(job),
        containers=[_node_container(job, securityContext=security.container_security())],
        volumes=[pod.shared_volume(job)] if wait_containers(job) else None,
    )
    job_set = _job_set(job, pod_spec, _ANCESTOR, elastic=job.section.is_elastic)
    return job.manifest(_API, "TrainingRuntime", labels=_FRAMEWORK, spec=_runtime_spec(job, {}, job_set))


def cluster_training_runtime(job: Job) -> Document:
    """Write `aliquot-cpu` or `aliquot-gpu`: a runtime for TrainJobs of other people or of the Kubeflow SDK.

    It holds everything except the command and its config. Nodes, storage and resources are those of `job`; the number
    of nodes is fixed, because torchrun needs it.
    """
    # Later versions take the number from the TrainJob; the default is one per GPU, or else one per requested CPU.
    processes = {"numProcPerNode": job.plan.ranks_per_node} if _old_dialect(job) else {}
    requests = limits = _resources(job)
    if not processes and not job.gpus:
        requests = {**limits, "cpu": "1"}  # taint and memory reserve the node for one pod, which may use all CPUs
    shutdown = {"name": _SHUTDOWN_TIMEOUT, "value": str(job.grace_s - _BEFORE_KUBELET_S)}
    container = _node_container(
        job,
        workingDir="/tmp",  # the SDK writes its script here, and any user may write
        env=[*pod.environment(job), shutdown],
        resources={"requests": requests, "limits": limits},
        securityContext=security.container_security(),
        volumeMounts=pod.volume_mounts(job, with_config=False),
    )
    pod_spec = compact(
        restartPolicy="Never",
        terminationGracePeriodSeconds=job.grace_s,
        securityContext=security.pod_security(),
        nodeSelector=pod.node_selector(job),
        tolerations=pod.tolerations(job),
        affinity=pod.affinity(job, any_job=True),
        serviceAccountName=job.section.service_account,
        automountServiceAccountToken=False,
        initContainers=wait_containers(job, any_run=True),
        containers=[container],
        volumes=pod.volumes(job, with_config=False),
    )
    spec = _runtime_spec(job, processes, _job_set(job, pod_spec, pod.runtime_labels(job), elastic=False))
    name = f"aliquot-{'gpu' if job.gpu_nodes else 'cpu'}"
    return job.manifest(_API, "ClusterTrainingRuntime", name, labels=_FRAMEWORK, namespaced=False, spec=spec)


def _node_container(job: Job, **fields: object) -> Document:
    section = job.section
    return {"name": NODE, "image": section.image, "imagePullPolicy": section.image_pull_policy, **fields}


def _runtime_spec(job: Job, torch: Document, job_set: Document) -> Document:
    return {"mlPolicy": {"numNodes": job.plan.nodes, "torch": torch}, "template": {"spec": job_set}}


def _job_set(job: Job, pod_spec: Document, pod_labels: dict[str, str], elastic: bool) -> Document:
    job_spec = {
        **(_one_by_one(job) if elastic else _all_together()),
        "template": {"metadata": {"labels": pod_labels}, "spec": pod_spec},
    }
    return {
        "failurePolicy": {"maxRestarts": 0} if elastic else _failure_policy(job),  # the Job of an elastic run restarts
        "replicatedJobs": [{"name": NODE, "template": {"metadata": {"labels": _ANCESTOR}, "spec": job_spec}}],
    }


def _resources(job: Job) -> dict[str, str]:
    """Return the requests and equal limits of a pod, so that it has the planned resources and is evicted last."""
    amounts = {"cpu": str(job.cpus), "memory": mebibytes(job.memory_bytes)}
    if job.scratch_bytes:
        amounts["ephemeral-storage"] = mebibytes(job.scratch_bytes + LOGS_BYTES)
    if job.gpus:
        amounts[GPU] = str(job.gpus)
    if job.efa_interfaces:
        amounts[EFA] = str(job.efa_interfaces)
    return amounts


def _old_dialect(job: Job) -> bool:
    return job.section.trainer == "2.1"


def _patches(job: Job) -> Document:
    """Write the pod fields for Trainer 2.2 and later."""
    spec = _pod(job, terminationGracePeriodSeconds=job.grace_s, securityContext=security.pod_security())
    replicated = {"name": NODE, "template": {"spec": {"template": {"spec": spec}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    return {"runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": runtime}]}


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


def _on_exit(action: str, code: int) -> Document:
    return {"action": action, "onExitCodes": {"containerName": NODE, "operator": "In", "values": [code]}}


def _on_disruption(action: str) -> Document:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _all_together() -> Document:
    """End the Job with the first failed pod, with a reason that identifies the case of `_failure_policy`."""
    rules = [_on_exit("FailJob", _STOPPED), _on_disruption("FailJob"), _on_exit("FailJob", _BAD_INPUT)]
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}


def _one_by_one(job: Job) -> Document:
    """Replace a pod that is lost or receives SIGTERM, while the other pods continue without it.

    All pods finish at the same time. The first finished pod ends the Job, so that no replacement starts without work.
    """
    rules = [_on_disruption("Ignore"), _on_exit("Ignore", _STOPPED), _on_exit("FailJob", _BAD_INPUT)]
    return {
        "backoffLimit": job.section.max_restarts * job.section.most_nodes,  # a crash ends the run on all nodes
        "podReplacementPolicy": "Failed",  # not before the old pod has saved
        "podFailurePolicy": {"rules": rules},
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }


def _failure_policy(job: Job) -> Document:
    """Restart all nodes together from the newest checkpoint; fail at once for bad input.

    A restart after a spot reclaim or a drain does not count, because the node has saved. The patterns match the Job
    controller's message, for example "... failed with exit code 143 matching FailJob rule at index 0".
    """
    reason = {"onJobFailureReasons": ["PodFailurePolicy"]}
    stopped = {
        "name": "stopped",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        **reason,
        "onJobFailureMessagePatterns": [f"exit code {_STOPPED} ", "condition DisruptionTarget "],
    }
    rules = [stopped, {"name": "badInput", "action": "FailJobSet", **reason}]
    return {"maxRestarts": job.section.max_restarts, "rules": rules}
