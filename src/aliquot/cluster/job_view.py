"""A TrainJob as the controller will run it: its own words, and below them those of its runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, of_kind
from aliquot.cluster.quantity import parse_bytes, parse_millicores
from aliquot.core.decode import BoundedTextLoader, TooDeepError

NODE = "node"
DEFAULT_GRACE_S = 30  # of Kubernetes


@dataclass(frozen=True)
class JobView:
    """What one pod of the job is. Unknown values (of a runtime that is not at hand) are None or empty."""

    manifest: ManifestObject
    runtime: ManifestObject | None
    nodes: int
    processes: object  # an integer, or a word
    image: str
    env: list[dict[str, Any]]
    patches: list[dict[str, Any]]  # pod specs laid over the runtime's
    node_selector: dict[str, str]
    tolerations: list[dict[str, Any]]
    volumes: list[dict[str, Any]]
    mounts: list[dict[str, Any]]
    annotations: dict[str, str]
    affinity: dict[str, Any]
    grace_s: int
    requests: dict[str, Any]  # of the container `node`, as are `limits`
    limits: dict[str, Any]
    beside: list[dict[str, Any]]  # resources of the containers that run beside it
    before: list[dict[str, Any]]  # of those that run before, one after the other

    @property
    def cpu_millicores(self) -> int | None:
        return parse_millicores(self.requests.get("cpu", self.limits.get("cpu")))

    @property
    def memory_limit_bytes(self) -> int | None:
        return parse_bytes(self.limits.get("memory"))

    def of_pod(self, resource: str, read: Callable[[object], int | None]) -> int:
        """What the scheduler looks for: the sum of what runs together, or of what runs before, the most."""
        own = {"requests": self.requests, "limits": self.limits}
        together = sum(_requested(each, resource, read) for each in [own, *self.beside])
        return max(together, *(_requested(each, resource, read) for each in self.before), 0)

    def count(self, resource: str) -> int:
        return parse_bytes(self.limits.get(resource, self.requests.get(resource, 0))) or 0

    @property
    def shm(self) -> dict[str, Any] | None:
        """The emptyDir that is mounted at /dev/shm; None where none is."""
        names = [mount.get("name") for mount in self.mounts if mount.get("mountPath") == "/dev/shm"]
        found = [volume for volume in self.volumes if volume.get("name") in names]
        return mapping(found[0].get("emptyDir")) if found else None


def job_views(manifests: list[ManifestObject]) -> list[JobView]:
    runtimes = of_kind(manifests, "TrainingRuntime", "ClusterTrainingRuntime")
    return [_view(job, runtimes) for job in of_kind(manifests, "TrainJob")]


def pod_patches(job: ManifestObject) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(pod metadata, pod spec) of every patch, in either dialect."""
    found = [(mapping(each.get("metadata")), mapping(each.get("spec"))) for each in
             job.items("spec", "podTemplateOverrides")]  # fmt: skip
    for patch in job.items("spec", "runtimePatches"):
        for replicated in listed(dig(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")):
            template = mapping(dig(replicated, "template", "spec", "template"))
            found.append((mapping(template.get("metadata")), mapping(template.get("spec"))))
    return found


def _view(job: ManifestObject, runtimes: list[ManifestObject]) -> JobView:
    kind = job.get("spec", "runtimeRef", "kind") or "ClusterTrainingRuntime"
    wanted = (kind, job.get("spec", "runtimeRef", "name"))
    runtime = next((each for each in runtimes if (each.kind, each.name) == wanted), None)
    base = runtime_pod(runtime)
    base_spec, base_container = mapping(base.get("spec")), _node_container(mapping(base.get("spec")))
    before = containers(base_spec, "initContainers")
    patches = pod_patches(job)
    specs = [base_spec, *(spec for _, spec in patches)]
    metadata = [mapping(base.get("metadata")), *(each for each, _ in patches)]
    trainer = mapping(job.get("spec", "trainer"))
    resources = [mapping(base_container.get("resources")), mapping(trainer.get("resourcesPerNode"))]
    grace = [spec["terminationGracePeriodSeconds"] for spec in specs if "terminationGracePeriodSeconds" in spec]
    nodes = trainer.get("numNodes") or (runtime and runtime.get("spec", "mlPolicy", "numNodes")) or 1
    return JobView(
        manifest=job,
        runtime=runtime,
        nodes=nodes if isinstance(nodes, int) else 1,
        processes=trainer.get("numProcPerNode", _runtime_processes(runtime)),
        image=str(trainer.get("image") or base_container.get("image") or ""),
        env=[*listed(base_container.get("env")), *listed(trainer.get("env"))],
        patches=[spec for _, spec in patches],
        node_selector=_merged([mapping(spec.get("nodeSelector")) for spec in specs]),
        tolerations=[item for spec in specs for item in listed(spec.get("tolerations"))],
        volumes=[item for spec in specs for item in listed(spec.get("volumes"))],
        mounts=[item for spec in specs for item in listed(_node_container(spec).get("volumeMounts"))],
        annotations=_merged([mapping(each.get("annotations")) for each in metadata]),
        affinity=_merged([mapping(spec.get("affinity")) for spec in specs]),
        grace_s=grace[-1] if grace and isinstance(grace[-1], int) else DEFAULT_GRACE_S,
        requests=_merged([mapping(each.get("requests")) for each in resources]),
        limits=_merged([mapping(each.get("limits")) for each in resources]),
        beside=[
            *(mapping(each.get("resources")) for each in containers(base_spec, "containers") if each != base_container),
            *(mapping(each.get("resources")) for each in before if each.get("restartPolicy") == "Always"),
        ],
        before=[mapping(each.get("resources")) for each in before if each.get("restartPolicy") != "Always"],
    )


def configs_of(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[object]:
    """What the ConfigMaps hold that its pods mount, every scalar as it is written: 2:4 is no number."""
    mounted = {mapping(volume.get("configMap")).get("name") for volume in job.volumes}
    for each in of_kind(list(manifests), "ConfigMap"):
        for text in mapping(each.get("data")).values() if each.name in mounted else ():
            with suppress(yaml.YAMLError, TooDeepError):
                yield yaml.load(str(text), Loader=BoundedTextLoader)


def runtime_pod(runtime: ManifestObject | None) -> dict[str, Any]:
    """The pod template of the job `node`."""
    if runtime is None:
        return {}
    jobs = [each for each in runtime.items("spec", "template", "spec", "replicatedJobs") if each.get("name") == NODE]
    return mapping(dig(jobs, 0, "template", "spec", "template"))


def pod_spec(job: JobView) -> dict[str, Any]:
    """The runtime's pod with the job's patches laid over it."""
    spec: dict[str, Any] = mapping(runtime_pod(job.runtime).get("spec"))
    for patch in job.patches:
        spec = _patched(spec, patch)
    return spec


def _patched(base: Any, patch: Any) -> Any:
    """A strategic merge: mappings key by key, lists of named things by name, anything else is replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: _patched(base.get(key), value) for key, value in patch.items()}}
    items = [*base, *patch] if isinstance(base, list) and isinstance(patch, list) else []
    if items and all(isinstance(item, dict) and "name" in item for item in items):
        named: dict[str, Any] = {}
        for item in items:
            named[str(item["name"])] = _patched(named.get(str(item["name"])), item)
        return list(named.values())
    return patch


def _runtime_processes(runtime: ManifestObject | None) -> object:
    return None if runtime is None else runtime.get("spec", "mlPolicy", "torch", "numProcPerNode")


def _node_container(spec: dict[str, Any]) -> dict[str, Any]:
    return mapping(dig([each for each in containers(spec, "containers") if each.get("name") == NODE], 0))


def containers(spec: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Those of a pod under `containers` or `initContainers`."""
    return [mapping(each) for each in listed(spec.get(key))]


def _requested(resources: dict[str, Any], name: str, read: Callable[[object], int | None]) -> int:
    """A limit without a request is one."""
    limit = mapping(resources.get("limits")).get(name, 0)
    return read(mapping(resources.get("requests")).get(name, limit)) or 0


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}
