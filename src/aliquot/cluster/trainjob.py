"""Write the TrainJob for Kubeflow Trainer, and the TrainingRuntime to which the TrainJob refers.

The runtime has the settings that a TrainJob cannot express in any version of Trainer: restarts, the meaning of exit
codes, and the init container that waits for the directories. Each job has a separate runtime in the job's namespace.
"""

from __future__ import annotations

from aliquot.cluster import pod
from aliquot.cluster.infrastructure import wait_containers
from aliquot.cluster.job import EFA, GPU, LOGS_BYTES, Job
from aliquot.cluster.manifests import Document, compact
from aliquot.cluster.pod import NODE
from aliquot.cluster.quantity import mebibytes

_API = "trainer.kubeflow.org/v1alpha1"
_MANAGER = "aliquot.io/render"
_ANCESTOR = {pod.ANCESTOR: "trainer"}
_FRAMEWORK = {"trainer.kubeflow.org/framework": "torch"}

# A PodGroup has no effect on pods of the default scheduler. These are the names that the schedulers' Helm charts give.
_SCHEDULERS = {"coscheduling": "scheduler-plugins-scheduler", "volcano": "volcano"}
_GANG_TIMEOUT_S = 600  # pods wait this long for the others, because nodes come one after another

# Exit codes of the trainer (see aliquot.core.errors and aliquot.distributed.signals).
_BAD_INPUT, _STOPPED = 2, 143
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # in seconds, for torchrun, which runs functions of the SDK
_BEFORE_KUBELET_S = 20  # torchrun kills its ranks this many seconds before the kubelet kills the pod


def train_job(job: Job) -> Document:
    queue = {"kueue.x-k8s.io/queue-name": job.section.queue} if job.section.queue else {}
    trainer = {
        "image": job.section.image,
        "command": pod.command(job),
        "numNodes": job.plan.nodes,
        # Not "auto", which means one process per CPU on a CPU node.
        "numProcPerNode": job.plan.ranks_per_node,
        "env": pod.environment(job),
        "resourcesPerNode": {"requests": _resources(job), "limits": _resources(job)},
    }
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
        "trainer": trainer,
        # Trainer 2.1 supports neither a grace period nor a security context here.
        **(
            {"podTemplateOverrides": [{"targetJobs": [{"name": NODE}], "spec": _pod(job)}]}
            if _old_dialect(job)
            else _patches(job)
        ),
    }
    return job.manifest(_API, "TrainJob", labels=queue, spec=spec)


def training_runtime(job: Job) -> Document:
    pod_spec = compact(
        restartPolicy="Never",  # JobSet restarts all nodes, because a single rank cannot rejoin its peers
        terminationGracePeriodSeconds=job.grace_s if _old_dialect(job) else None,
        securityContext=pod.pod_security() if _old_dialect(job) else None,
        **_scheduling(job),
        automountServiceAccountToken=False,  # an IAM role and Trainer's status have separate tokens
        initContainers=wait_containers(job),
        containers=[_node_container(job, securityContext=pod.container_security())],
        volumes=[pod.shared_volume(job)] if wait_containers(job) else None,
    )
    job_set = _job_set(job, pod_spec, _ANCESTOR, elastic=job.section.is_elastic)
    return job.manifest(_API, "TrainingRuntime", labels=_FRAMEWORK, spec=_runtime_spec(job, {}, job_set))


def cluster_training_runtime(job: Job) -> Document:
    """Write `aliquot-cpu` or `aliquot-gpu`: a runtime for TrainJobs of other users or of the Kubeflow SDK.

    The runtime has all settings except the command and the config. Nodes, storage and resources are those of `job`. The
    number of nodes is fixed, because torchrun needs it.
    """
    # Trainer 2.2 and later take the number of processes from the TrainJob. The default is one process per GPU, or one
    # per requested CPU without GPUs.
    processes = {"numProcPerNode": job.plan.ranks_per_node} if _old_dialect(job) else {}
    limits = _resources(job)
    # Request one CPU for one process. Taint and memory request still reserve the whole node for one pod.
    requests = limits if processes or job.gpus else {**limits, "cpu": "1"}
    container = _node_container(
        job,
        workingDir="/tmp",  # the SDK writes its script to the working directory, and any user may write to /tmp
        env=[*pod.environment(job), {"name": _SHUTDOWN_TIMEOUT, "value": str(job.grace_s - _BEFORE_KUBELET_S)}],
        resources={"requests": requests, "limits": limits},
        securityContext=pod.container_security(),
        volumeMounts=pod.volume_mounts(job, with_config=False),
    )
    pod_spec = compact(
        restartPolicy="Never",
        terminationGracePeriodSeconds=job.grace_s,
        securityContext=pod.pod_security(),
        nodeSelector=pod.node_selector(job),
        tolerations=pod.tolerations(job),
        affinity=pod.affinity(job, any_job=True),
        **_scheduling(job),
        serviceAccountName=job.section.service_account,
        automountServiceAccountToken=False,
        initContainers=wait_containers(job, any_run=True),
        containers=[container],
        volumes=pod.volumes(job, with_config=False),
    )
    spec = _runtime_spec(job, processes, _job_set(job, pod_spec, pod.runtime_labels(job), torchrun=True))
    name = f"aliquot-{'gpu' if job.gpus else 'cpu'}"
    return job.manifest(_API, "ClusterTrainingRuntime", name, labels=_FRAMEWORK, namespaced=False, spec=spec)


def _node_container(job: Job, **fields: object) -> Document:
    section = job.section
    return {"name": NODE, "image": section.image, "imagePullPolicy": section.image_pull_policy, **fields}


def _runtime_spec(job: Job, torch: Document, job_set: Document) -> Document:
    seconds = {"scheduleTimeoutSeconds": _GANG_TIMEOUT_S} if job.section.gang_scheduling == "coscheduling" else {}
    return compact(
        mlPolicy={"numNodes": job.plan.nodes, "torch": torch},
        podGroupPolicy={job.section.gang_scheduling: seconds} if job.section.gang_scheduling else None,
        template={"spec": job_set},
    )


def _scheduling(job: Job) -> Document:
    return {
        "schedulerName": _SCHEDULERS.get(job.section.gang_scheduling or ""),
        "priorityClassName": job.section.priority_class,
    }


def _job_set(
    job: Job, pod_spec: Document, pod_labels: dict[str, str], elastic: bool = False, torchrun: bool = False
) -> Document:
    job_spec = {
        **(_one_by_one(job) if elastic else _all_together()),
        "template": {"metadata": {"labels": pod_labels}, "spec": pod_spec},
    }
    return {
        # In an elastic run the Job replaces lost pods, so that the JobSet needs no restarts.
        "failurePolicy": {"maxRestarts": 0} if elastic else _failure_policy(job, torchrun),
        "replicatedJobs": [{"name": NODE, "template": {"metadata": {"labels": _ANCESTOR}, "spec": job_spec}}],
    }


def _resources(job: Job) -> dict[str, str]:
    """Return the resources of a pod, for requests and equal limits, so that Kubernetes evicts the pod last."""
    return compact(**{
        "cpu": str(job.cpus),
        "memory": mebibytes(job.memory_bytes),
        "ephemeral-storage": mebibytes(job.scratch_bytes + LOGS_BYTES) if job.scratch_bytes else None,
        GPU: str(job.gpus) if job.gpus else None,
        EFA: str(job.efa_interfaces) if job.efa_interfaces else None,
    })  # fmt: skip


def _old_dialect(job: Job) -> bool:
    return job.section.trainer == "2.1"


def _patches(job: Job) -> Document:
    """Write the pod fields for Trainer 2.2 and later."""
    spec = _pod(job, terminationGracePeriodSeconds=job.grace_s, securityContext=pod.pod_security())
    replicated = {"name": NODE, "template": {"spec": {"template": {"spec": spec}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    return {"runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": runtime}]}


def _pod(job: Job, **fields: object) -> Document:
    """Write the pod fields that all versions of Trainer support, with additional `fields` before the volumes."""
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
    """Return Job settings that end the Job at the first failed pod.

    The rule that matches appears in the reason of the failure, by which `_failure_policy` decides about a restart.
    """
    rules = [_on_exit("FailJob", _STOPPED), _on_disruption("FailJob"), _on_exit("FailJob", _BAD_INPUT)]
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}


def _one_by_one(job: Job) -> Document:
    """Return Job settings for elastic runs: replace a pod that is lost or gets SIGTERM, while the other pods continue.

    All pods finish training at the same time. The first finished pod ends the Job, so that no replacement pod starts
    after the end of the run.
    """
    rules = [_on_disruption("Ignore"), _on_exit("Ignore", _STOPPED), _on_exit("FailJob", _BAD_INPUT)]
    return {
        "backoffLimit": job.section.max_restarts * job.section.most_nodes,  # a crash ends the pods of all nodes
        "podReplacementPolicy": "Failed",  # start a replacement only after the old pod has saved and ended
        "podFailurePolicy": {"rules": rules},
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }


def _failure_policy(job: Job, torchrun: bool) -> Document:
    """Return the JobSet policy for a failed Job: restart all nodes together. The run then resumes from a checkpoint.

    For bad input the JobSet fails without a restart. A restart after a spot reclaim or a drain does not count towards
    `maxRestarts`, because the pod has ended with exit code 143 and saved a checkpoint. A pod that is lost or evicted
    without this code counts, as a crash does; else a node under pressure would restart the job for ever. The patterns
    match the message of the Job controller, such as "... failed with exit code 143 matching FailJob rule at index 0".

    Args:
        torchrun: ranks start under torchrun, which ends with exit code 1 in place of 143; then the condition of a
            disrupted pod alone says that the pod was drained.
    """
    reason = {"onJobFailureReasons": ["PodFailurePolicy"]}
    stopped = {
        "name": "stopped",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        **reason,
        "onJobFailureMessagePatterns": [
            f"exit code {_STOPPED} ",
            *(["condition DisruptionTarget "] if torchrun else []),
        ],
    }
    bad_input = {
        "name": "badInput",
        "action": "FailJobSet",
        **reason,
        "onJobFailureMessagePatterns": [f"exit code {_BAD_INPUT} "],
    }
    return {"maxRestarts": job.section.max_restarts, "rules": [stopped, bad_input]}
