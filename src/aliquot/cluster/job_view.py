"""View a TrainJob as its controllers run it: the pods that come of the TrainJob and its runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, reduce
from typing import Any

from aliquot.cluster.manifests import ManifestObject, compact, dig, listed, mapping, mappings, select_kinds
from aliquot.cluster.pod import ANCESTOR, JOB_SET, NODE
from aliquot.cluster.quantity import parse

SHM = "/dev/shm"
_QUEUE = "kueue.x-k8s.io/queue-name"
_POD = ("template", "spec", "template")
_PATCHED_JOBS = ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")
_DEFAULT_GRACE_S = 30  # the default of Kubernetes
_MERGE_KEYS = ("mountPath", "name")  # of lists whose items a strategic merge patch of Kubernetes merges


@dataclass(frozen=True)
class JobView:
    """What rules check of a job. If its runtime is not among the manifests, `pod` has the TrainJob's fields only."""

    manifest: ManifestObject
    runtime: ManifestObject | None
    other_runtimes: list[str]  # kind/name of the runtimes among the manifests, if none of them is the job's
    nodes: int
    processes: object  # numProcPerNode: an integer, or a word such as `auto`
    pod: dict[str, Any]  # the pod spec: the runtime's, with the fields of the TrainJob merged over it
    labels: dict[str, Any]
    annotations: dict[str, Any]

    @property
    def queue(self) -> object:
        """The name of Kueue's LocalQueue, or None."""
        return self.manifest.get("metadata", "labels", _QUEUE)

    @property
    def node(self) -> dict[str, Any]:
        """The container of the trainer."""
        return next((item for item in mappings(self.pod, "containers") if item.get("name") == NODE), {})

    @property
    def image(self) -> str:
        return str(self.node.get("image") or "")

    @property
    def command(self) -> list[str]:
        """The words of the trainer's command and arguments."""
        return [str(word) for key in ("command", "args") for word in listed(self.node.get(key))]

    @property
    def env(self) -> list[dict[str, Any]]:
        return mappings(self.node, "env")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that have their value in the manifest."""
        return {str(item.get("name")): str(item["value"]) for item in self.env if "value" in item}

    @property
    def requests(self) -> dict[str, Any]:
        return mapping(dig(self.node, "resources", "requests"))

    @property
    def limits(self) -> dict[str, Any]:
        return mapping(dig(self.node, "resources", "limits"))

    @property
    def grace_s(self) -> int:
        """The seconds between SIGTERM and SIGKILL."""
        seconds = self.pod.get("terminationGracePeriodSeconds")
        return seconds if isinstance(seconds, int) else _DEFAULT_GRACE_S

    @property
    def shm(self) -> dict[str, Any] | None:
        """The emptyDir volume at /dev/shm, or None if no volume is mounted there."""
        mount = self.mount(SHM)
        return None if mount is None or mount[0].get("mountPath") != SHM else mapping(mount[1].get("emptyDir"))

    @property
    def volumes(self) -> dict[str, dict[str, Any]]:
        """The pod's volumes by name."""
        return {str(volume.get("name")): volume for volume in mappings(self.pod, "volumes")}

    @cached_property
    def requested(self) -> dict[str, Fraction]:
        """What the scheduler reserves for a pod: all concurrent containers, or an init container that needs more."""
        init = mappings(self.pod, "initContainers")
        sidecars = [item for item in init if item.get("restartPolicy") == "Always"]
        total: dict[str, Fraction] = {}
        for container in [*mappings(self.pod, "containers"), *sidecars]:
            for name, amount in _requests(container).items():
                total[name] = total.get(name, Fraction(0)) + amount
        for container in (item for item in init if item not in sidecars):
            total |= {name: max(amount, total.get(name, amount)) for name, amount in _requests(container).items()}
        return total

    def count(self, resource: str) -> int:
        return int(self.requested.get(resource, 0))

    def mount(self, path: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the volumeMount that holds `path` in the trainer's container, and its volume; None without a mount."""
        parents = {"/" if end == 0 else path[:end] for end, letter in enumerate(path) if letter == "/"} | {path}
        mounts = [item for item in mappings(self.node, "volumeMounts") if str(item.get("mountPath")) in parents]
        mount = max(mounts, key=lambda item: len(str(item["mountPath"])), default=None)
        return None if mount is None else (mount, self.volumes.get(str(mount.get("name")), {}))


def job_views(manifests: Sequence[ManifestObject]) -> list[JobView]:
    runtimes = select_kinds(manifests, "TrainingRuntime", "ClusterTrainingRuntime")
    return [_view(job, runtimes) for job in select_kinds(manifests, "TrainJob")]


def patches(job: ManifestObject) -> Iterator[tuple[object, dict[str, Any]]]:
    """Yield (replicated job, pod template) of every patch in a TrainJob.

    Kubeflow Trainer 2.1 calls the patches podTemplateOverrides, later versions call them runtimePatches.
    """
    for patch in job.items("spec", "podTemplateOverrides"):
        yield from ((mapping(target).get("name"), patch) for target in listed(patch.get("targetJobs")))
    for item in job.items("spec", "runtimePatches"):
        for replicated in map(mapping, listed(dig(item, *_PATCHED_JOBS))):
            yield replicated.get("name"), mapping(dig(replicated, *_POD))


def _view(job: ManifestObject, runtimes: list[ManifestObject]) -> JobView:
    kind = job.get("spec", "runtimeRef", "kind") or "ClusterTrainingRuntime"
    runtime_key = (kind, job.get("spec", "runtimeRef", "name"))
    runtime = next((item for item in runtimes if (item.kind, item.name) == runtime_key), None)
    trainer = mapping(job.get("spec", "trainer"))
    fields = {key: trainer.get(key) for key in ("image", "command", "args", "env")}
    container = compact(name=NODE, **fields, resources=trainer.get("resourcesPerNode"))
    base = next((mapping(spec.get("template")) for name, spec in job_specs(runtime) if name == NODE), {})
    template = reduce(_patched, [base, *(patch for _, patch in patches(job)), {"spec": {"containers": [container]}}])
    policy = mapping(runtime.get("spec", "mlPolicy")) if runtime is not None else {}
    nodes = trainer.get("numNodes", policy.get("numNodes"))
    return JobView(
        manifest=job,
        runtime=runtime,
        other_runtimes=[f"{item.kind}/{item.name}" for item in runtimes] if runtime is None else [],
        nodes=nodes if isinstance(nodes, int) else 1,
        processes=trainer.get("numProcPerNode", dig(policy, "torch", "numProcPerNode")),
        pod=mapping(template.get("spec")),
        labels=mapping(dig(template, "metadata", "labels")) | {JOB_SET: job.name, ANCESTOR: "trainer"},
        annotations=mapping(dig(template, "metadata", "annotations")),
    )


def job_specs(runtime: ManifestObject | None) -> list[tuple[object, dict[str, Any]]]:
    """Return (name, job spec) of each replicated job in the JobSet of a runtime."""
    jobs = runtime.items("spec", "template", "spec", "replicatedJobs") if runtime is not None else []
    return [(job.get("name"), mapping(dig(job, "template", "spec"))) for job in jobs]


def _patched(base: Any, patch: Any) -> Any:
    """Merge `patch` into `base` like a strategic merge patch of Kubernetes.

    Mappings are merged by key, and lists of named items by name. Other values of `patch` replace those of `base`.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: _patched(base.get(key), value) for key, value in patch.items()}}
    items = [*base, *patch] if isinstance(base, list) and isinstance(patch, list) else []
    for merge_key in _MERGE_KEYS:
        if items and all(isinstance(item, dict) and merge_key in item for item in items):
            merged: dict[str, Any] = {}
            for item in items:
                merged[str(item[merge_key])] = _patched(merged.get(str(item[merge_key])), item)
            return list(merged.values())
    return patch


def _requests(container: dict[str, Any]) -> dict[str, Fraction]:
    """Return the requests of a container; a limit without a request counts as a request, as in Kubernetes."""
    resources = [mapping(dig(container, "resources", key)) for key in ("limits", "requests")]
    amounts = {str(name): parse(value) for part in resources for name, value in part.items()}
    return {name: amount for name, amount in amounts.items() if amount is not None}
