"""Run `aliquot cluster status`: report the progress of a job, or why it does not run. Changes nothing."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.cluster.live_cluster import Kubectl, Refused
from aliquot.cluster.manifests import dig, listed, mapping
from aliquot.cluster.pod import NODE
from aliquot.core.errors import ClusterError

Object = dict[str, Any]

_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
_INDEX = "batch.kubernetes.io/job-completion-index"
_NODE_LABELS = ("node.kubernetes.io/instance-type", "topology.kubernetes.io/zone", "karpenter.sh/capacity-type")
_LAST_LINES = 50  # number of lines at the end of rank 0's log in which to search for the last step

# Patterns of the scheduler's messages, and explanations for users.
_UNSCHEDULABLE = (
    (r"Insufficient ([\w./-]*\w)", "no node has enough {0} free: a new node is coming, or no NodePool may create one"),
    (r"untolerated taint \{([^}]*)\}", "nodes have the taint {0}, which the pod does not tolerate"),
    (r"didn't match Pod's node affinity/selector", "no node has the labels that the pod selects"),
    (r"didn't match pod affinity rules", "the pods of a job must be in one zone, and no node of that zone is free"),
    (r'persistentvolumeclaim "([^"]+)" not found', "the claim {0} does not exist"),
    (r"unbound immediate PersistentVolumeClaims", "its claim has no volume yet: kubectl describe pvc"),
)
_WAITING = {
    "ImagePullBackOff": "the image cannot be pulled",
    "ErrImagePull": "the image cannot be pulled",
    "InvalidImageName": "the image's name is wrong",
    "CreateContainerConfigError": "a Secret or ConfigMap that the pod names is missing",
    "CrashLoopBackOff": "its container ends again and again",
    "ContainerCreating": "volumes are being mounted, the image pulled",
}
_ENDED = {2: "bad input: see the log", 137: "killed, most often for memory", 143: "stopped, and saved before"}


def job_status(name: str, namespace: str, kubectl: Kubectl) -> Iterator[str]:
    """Yield the lines of the report. Raises UserError if the job does not exist or kubectl may not read it."""
    job = _job(name, namespace, kubectl)
    pods = job_pods(name, namespace, kubectl)
    running = sum(dig(item, "status", "phase") == "Running" for item in pods)
    yield f"TrainJob {namespace}/{name}: {_state(job)}; {running} of {len(pods)} pods run"
    yield from _progress(job)
    if not pods:
        yield f"no pods: {_why_no_pods(job)}"
    events = _maybe(kubectl, "events", "-n", namespace) if pods else []
    nodes = {_name(item): item for item in _maybe(kubectl, "nodes")} if pods else {}
    for pod in pods:
        node = dig(pod, "spec", "nodeName")
        what = why_waiting(pod, events) or _ended(pod) or ""
        yield "  " + "  ".join(filter(None, (_name(pod), dig(pod, "status", "phase"), _node(node, nodes), what)))
    if any(dig(pod, "status", "phase") == "Pending" for pod in pods):
        yield from _coming_nodes(kubectl)
    if running and (line := _last_step(pods, namespace, kubectl)) is not None:
        yield f"rank 0: {line}"


def job_pods(name: str, namespace: str, kubectl: Kubectl) -> list[Object]:
    """Return the pods of the job's newest attempt, ordered by node index.

    If a pod has been replaced, only the newest pod of that index counts. Raises UserError if kubectl may not list pods.
    """
    try:
        pods = kubectl.get("pods", "-n", namespace, "-l", f"jobset.sigs.k8s.io/jobset-name={name}")
    except Refused as refused:
        raise ClusterError(f"the pods of {namespace}/{name} cannot be listed: {refused.last_line}") from None
    newest = max((_number(pod, _ATTEMPT) for pod in pods), default=0)
    current = [pod for pod in pods if _number(pod, _ATTEMPT) == newest]
    current.sort(key=lambda pod: str(dig(pod, "metadata", "creationTimestamp") or ""))
    pods_by_index = {_number(pod, _INDEX): pod for pod in current}
    return [pods_by_index[index] for index in sorted(pods_by_index)]


def why_waiting(pod: Object, events: Sequence[Object]) -> str | None:
    """Explain why a pod is pending, with the message of Kubernetes; None if the pod runs or has ended."""
    if dig(pod, "status", "phase") != "Pending":
        return None
    pod_events = [event for event in events if dig(event, "involvedObject", "name") == _name(pod)]
    warnings = [str(event.get("message")) for event in pod_events if event.get("type") == "Warning"]
    for condition in listed(dig(pod, "status", "conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            if condition.get("reason") == "SchedulingGated":
                return "the job waits until its queue admits the job"
            says = str(condition.get("message") or (warnings or ["nothing said yet"])[-1])
            return f"{_unschedulable(says)} ({says})"
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in listed(dig(pod, "status", kind)):
            reason = dig(container, "state", "waiting", "reason")
            if reason is not None and reason != "PodInitializing":
                says = dig(container, "state", "waiting", "message") or (warnings or [""])[-1]
                return f"{_WAITING.get(reason, reason)}{f' ({says})' if says else ''}"
    if any(dig(event, "state", "running") is not None for event in listed(dig(pod, "status", "initContainerStatuses"))):
        return "the pod waits for the Job that makes the directories of the run: kubectl get jobs"
    return (
        warnings[-1]
        if warnings
        else "the pod has a node, and starts"
        if dig(pod, "spec", "nodeName")
        else "no node yet"
    )


def _unschedulable(says: str) -> str:
    matches = ((re.search(pattern, says), words) for pattern, words in _UNSCHEDULABLE)
    return next((words.format(*match.groups()) for match, words in matches if match), "no node can take the pod")


def _job(name: str, namespace: str, kubectl: Kubectl) -> Object:
    try:
        (job,) = kubectl.get("trainjob", name, "-n", namespace)
    except Refused as refused:
        if "NotFound" in str(refused):
            raise ClusterError(f"TrainJob {namespace}/{name} does not exist: kubectl get trainjobs -A") from None
        raise ClusterError(f"TrainJob {namespace}/{name} cannot be read: {refused.last_line}") from None
    return job


def _state(job: Object) -> str:
    conditions = {condition.get("type"): condition for condition in listed(dig(job, "status", "conditions"))}
    for kind, words in (("Complete", "complete"), ("Failed", "failed"), ("Suspended", "suspended")):
        match = mapping(conditions.get(kind))
        if match.get("status") == "True":
            return f"{words} ({match.get('message') or match.get('reason')})"
    return "suspended" if dig(job, "spec", "suspend") else "not finished"


def _why_no_pods(job: Object) -> str:
    if dig(job, "spec", "suspend"):
        return "the job is suspended: its queue has not admitted it, or a person has stopped it"
    for condition in listed(dig(job, "status", "conditions")):
        if condition.get("status") == "True":
            return str(condition.get("message") or condition.get("reason"))
    return "Trainer has not seen the job yet: does its controller run? kubectl get pods -n kubeflow-system"


def _progress(job: Object) -> Iterator[str]:
    """Report the progress that the run has posted to the TrainJob's status.

    The run posts progress only if Trainer's feature gate TrainJobRuntimeStatus is on.
    """
    status = mapping(dig(job, "status", "trainerStatus"))
    if not status:
        return
    left = status.get("estimatedRemainingSeconds")
    parts = [
        f"{status.get('progressPercentage')} %",
        *([f"{datetime.timedelta(seconds=left)} left"] if isinstance(left, int) else []),
        *(f"{metric.get('name')} {metric.get('value')}" for metric in listed(status.get("metrics"))),
    ]
    yield f"{', '.join(parts)} (at {status.get('lastUpdatedTime')})"


def _node(name: Any, nodes: dict[str, Object]) -> str:
    if not name:
        return ""
    labels = _labels(mapping(nodes.get(name)))
    conditions = listed(dig(nodes.get(name), "status", "conditions"))
    waits = any(item.get("type") == "Ready" and item.get("status") != "True" for item in conditions)
    about = [*(labels[key] for key in _NODE_LABELS if key in labels), *(["not ready"] if waits else [])]
    return f"on {name}" + (f" ({', '.join(about)})" if about else "")


def _ended(pod: Object) -> str | None:
    ends = [dig(container, "state", "terminated") for container in listed(dig(pod, "status", "containerStatuses"))]
    codes = [(end["exitCode"], end.get("reason") or "see the log") for end in map(mapping, ends) if end.get("exitCode")]
    return next((f"exit code {code}: {_ENDED.get(code, reason)}" for code, reason in codes), None)


def _coming_nodes(kubectl: Kubectl) -> Iterator[str]:
    """Report the nodes that Karpenter is creating, and why each of these nodes is not ready yet."""
    for claim in _maybe(kubectl, "nodeclaims"):
        for condition in listed(dig(claim, "status", "conditions")):
            if condition.get("type") in ("Launched", "Registered", "Initialized") and condition.get("status") != "True":
                says = condition.get("message") or condition.get("reason") or "on its way"
                yield f"  node {_name(claim)}: not {str(condition['type']).lower()} ({says})"
                break


def _last_step(pods: Sequence[Object], namespace: str, kubectl: Kubectl) -> str | None:
    try:
        log = kubectl.run("logs", _name(pods[0]), "-n", namespace, "-c", NODE, f"--tail={_LAST_LINES}")
    except Refused:
        return None
    lines = [line for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.lstrip().startswith("step")), lines[-1] if lines else None)


def _maybe(kubectl: Kubectl, *arguments: str) -> list[Object]:
    """Run `kubectl get` and return the objects, or an empty list if they do not exist or access is denied."""
    try:
        return kubectl.get(*arguments)
    except Refused:
        return []


def _name(item: Object) -> str:
    return str(dig(item, "metadata", "name"))


def _labels(item: Object) -> dict[str, str]:
    return mapping(dig(item, "metadata", "labels"))


def _number(pod: Object, label: str) -> int:
    return int(_labels(pod).get(label) or 0)
