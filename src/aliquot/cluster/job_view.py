"""View a TrainJob as its controller runs it: with the fields of the TrainJob merged over the fields of its runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import yaml

from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, mappings, select_kinds
from aliquot.cluster.quantity import parse_bytes, parse_millicores
from aliquot.core.decode import BoundedTextLoader, TooDeepError

NODE = "node"
_QUEUE = "kueue.x-k8s.io/queue-name"
DEFAULT_GRACE_S = 30  # the default of Kubernetes


@dataclass(frozen=True)
class JobView:
    """The fields of a job's pods that rules check.

    If the runtime of the job is not among the manifests, fields that the runtime would set are None or empty.
    """

    manifest: ManifestObject
    runtime: ManifestObject | None
    other_runtimes: list[str]  # kind/name of the runtimes among the manifests, if none of them is the job's
    nodes: int
    processes: object  # numProcPerNode: an integer, or a word such as `auto`
    image: str
    env: list[dict[str, Any]]
    pod_specs: list[dict[str, Any]]  # the runtime's pod spec, and the TrainJob's, which the controller merges over it
    node_selector: dict[str, str]
    tolerations: list[dict[str, Any]]
    volumes: list[dict[str, Any]]
    mounts: list[dict[str, Any]]
    annotations: dict[str, str]
    affinity: dict[str, Any]
    grace_s: int
    requests: dict[str, Any]  # resource requests of the container `node`
    limits: dict[str, Any]  # resource limits of the container `node`
    sidecars: list[dict[str, Any]]  # resources of the containers that run at the same time as the container `node`
    init_containers: list[dict[str, Any]]  # resources of the init containers, which run before, one after another

    @property
    def queue(self) -> object:
        """The name of Kueue's LocalQueue, or None."""
        return self.manifest.get("metadata", "labels", _QUEUE)

    @property
    def command(self) -> list[str]:
        """The words of the trainer's command and arguments."""
        trainer = mapping(self.manifest.get("spec", "trainer"))
        return [str(word) for key in ("command", "args") for word in listed(trainer.get(key))]

    @property
    def cpu_millicores(self) -> int | None:
        return parse_millicores(self.requests.get("cpu", self.limits.get("cpu")))

    @property
    def memory_limit_bytes(self) -> int | None:
        return parse_bytes(self.limits.get("memory"))

    def pod_total(self, resource: str, read: Callable[[object], int | None]) -> int:
        """Return the amount of a resource that the scheduler reserves for the pod.

        This is the sum over concurrent containers, or the amount of the largest init container if that is more.
        """
        node_resources = {"requests": self.requests, "limits": self.limits}
        together = sum(_requested(resources, resource, read) for resources in [node_resources, *self.sidecars])
        return max(together, *(_requested(resources, resource, read) for resources in self.init_containers), 0)

    def count(self, resource: str) -> int:
        return parse_bytes(self.limits.get(resource, self.requests.get(resource, 0))) or 0

    @property
    def shm(self) -> dict[str, Any] | None:
        """Return the fields of the emptyDir volume mounted at /dev/shm, or None if no volume is mounted there."""
        names = [mount.get("name") for mount in self.mounts if mount.get("mountPath") == "/dev/shm"]
        shm_volumes = [volume for volume in self.volumes if volume.get("name") in names]
        return mapping(shm_volumes[0].get("emptyDir")) if shm_volumes else None


def job_views(manifests: Sequence[ManifestObject]) -> list[JobView]:
    runtimes = select_kinds(manifests, "TrainingRuntime", "ClusterTrainingRuntime")
    return [_view(job, runtimes) for job in select_kinds(manifests, "TrainJob")]


def _pod_patches(job: ManifestObject) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (pod metadata, pod spec) of every patch in a TrainJob.

    Kubeflow Trainer 2.1 calls the patches podTemplateOverrides, later versions call them runtimePatches.
    """
    templates: list[Any] = job.items("spec", "podTemplateOverrides")
    for patch in job.items("spec", "runtimePatches"):
        replicated = listed(dig(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs"))
        templates += [dig(item, "template", "spec", "template") for item in replicated]
    return [(mapping(dig(template, "metadata")), mapping(dig(template, "spec"))) for template in templates]


def patched_jobs(job: ManifestObject) -> list[object]:
    """Return the names of the replicated jobs that the patches of a TrainJob are for."""
    targets = [item for patch in job.items("spec", "podTemplateOverrides") for item in listed(patch.get("targetJobs"))]
    for patch in job.items("spec", "runtimePatches"):
        targets += listed(dig(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs"))
    return [mapping(target).get("name") for target in targets]


def _view(job: ManifestObject, runtimes: list[ManifestObject]) -> JobView:
    kind = job.get("spec", "runtimeRef", "kind") or "ClusterTrainingRuntime"
    runtime_key = (kind, job.get("spec", "runtimeRef", "name"))
    runtime = next((item for item in runtimes if (item.kind, item.name) == runtime_key), None)
    base = next((mapping(spec.get("template")) for name, spec in job_specs(runtime) if name == NODE), {})
    base_spec = mapping(base.get("spec"))
    base_container, init_containers = _node_container(base_spec), mappings(base_spec, "initContainers")
    sidecars = [item for item in mappings(base_spec, "containers") if item != base_container]
    sidecars += [item for item in init_containers if item.get("restartPolicy") == "Always"]
    patches = _pod_patches(job)
    specs = [base_spec, *(spec for _, spec in patches)]
    metadata = [mapping(base.get("metadata")), *(item for item, _ in patches)]
    trainer = mapping(job.get("spec", "trainer"))
    resources = [mapping(base_container.get("resources")), mapping(trainer.get("resourcesPerNode"))]
    grace = [spec["terminationGracePeriodSeconds"] for spec in specs if "terminationGracePeriodSeconds" in spec]
    nodes = trainer.get("numNodes", runtime and runtime.get("spec", "mlPolicy", "numNodes"))
    return JobView(
        manifest=job,
        runtime=runtime,
        other_runtimes=[f"{item.kind}/{item.name}" for item in runtimes] if runtime is None else [],
        nodes=nodes if isinstance(nodes, int) else 1,
        processes=trainer.get("numProcPerNode", runtime and runtime.get("spec", "mlPolicy", "torch", "numProcPerNode")),
        image=str(trainer.get("image") or base_container.get("image") or ""),
        env=[*listed(base_container.get("env")), *listed(trainer.get("env"))],
        pod_specs=specs,
        node_selector=_merged([mapping(spec.get("nodeSelector")) for spec in specs]),
        tolerations=[item for spec in specs for item in listed(spec.get("tolerations"))],
        volumes=[item for spec in specs for item in listed(spec.get("volumes"))],
        mounts=[item for spec in specs for item in listed(_node_container(spec).get("volumeMounts"))],
        annotations=_merged([mapping(item.get("annotations")) for item in metadata]),
        affinity=_merged([mapping(spec.get("affinity")) for spec in specs]),
        grace_s=grace[-1] if grace and isinstance(grace[-1], int) else DEFAULT_GRACE_S,
        requests=_merged([mapping(item.get("requests")) for item in resources]),
        limits=_merged([mapping(item.get("limits")) for item in resources]),
        sidecars=[mapping(item.get("resources")) for item in sidecars],
        init_containers=[
            mapping(item.get("resources")) for item in init_containers if item.get("restartPolicy") != "Always"
        ],
    )


def configs_of(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[object]:
    """Parse the configs in the ConfigMaps that the pods mount.

    Scalars are read as text, because YAML reads a range such as `2:4` as a number.
    """
    mounted = {mapping(volume.get("configMap")).get("name") for volume in job.volumes}
    for config_map in select_kinds(manifests, "ConfigMap"):
        for text in mapping(config_map.get("data")).values() if config_map.name in mounted else ():
            with suppress(yaml.YAMLError, TooDeepError):
                yield yaml.load(str(text), Loader=BoundedTextLoader)


def job_specs(runtime: ManifestObject | None) -> list[tuple[object, dict[str, Any]]]:
    """Return (name, job spec) of each replicated job in the JobSet of a runtime."""
    jobs = runtime.items("spec", "template", "spec", "replicatedJobs") if runtime is not None else []
    return [(job.get("name"), mapping(dig(job, "template", "spec"))) for job in jobs]


def pod_spec(job: JobView) -> dict[str, Any]:
    """Return the pod spec of the job: the runtime's pod spec with the patches of the TrainJob merged over it."""
    return reduce(_patched, job.pod_specs)


def _patched(base: Any, patch: Any) -> Any:
    """Merge `patch` into `base` like a strategic merge patch of Kubernetes.

    Mappings are merged by key, and lists of items with names by name. Other values of `patch` replace those of `base`.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: _patched(base.get(key), value) for key, value in patch.items()}}
    items = [*base, *patch] if isinstance(base, list) and isinstance(patch, list) else []
    if items and all(isinstance(item, dict) and "name" in item for item in items):
        named: dict[str, Any] = {}
        for item in items:
            named[str(item["name"])] = _patched(named.get(str(item["name"])), item)
        return list(named.values())
    return patch


def _node_container(spec: dict[str, Any]) -> dict[str, Any]:
    return next((container for container in mappings(spec, "containers") if container.get("name") == NODE), {})


def _requested(resources: dict[str, Any], name: str, read: Callable[[object], int | None]) -> int:
    """Return the requested amount of a resource; a limit without a request counts as a request, as in Kubernetes."""
    limit = mapping(resources.get("limits")).get(name, 0)
    return read(mapping(resources.get("requests")).get(name, limit)) or 0


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}
