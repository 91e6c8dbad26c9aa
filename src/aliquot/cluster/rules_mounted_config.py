"""Rules about the config that a job's command names: the pods must find it, and it must suit the pods.

The command `aliquot train PATH` reads a file of the image, of the shared file system, or of a mounted ConfigMap. Only
the ConfigMaps among the manifests can be read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from aliquot.cluster.findings import Check, RuleFinding, did_you_mean, failures, finding
from aliquot.cluster.job import GPU
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, select_kinds
from aliquot.config.read_config import read_text
from aliquot.config.schema import RunConfig
from aliquot.core.errors import DeepspeedConfigError, UserError

_SUFFIXES = (".yaml", ".yml")
_LOST_WITH_THE_POD = ("emptyDir", "ephemeral")


def check_mounted_config(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    words = job.command
    path = next((word for word in words if word.startswith("/") and word.endswith(_SUFFIXES)), None)
    if job.runtime is None or path is None or not any("aliquot" in word for word in words):
        return
    mount = _mount(job, path)
    if mount is None:
        message = f"the command reads {path}, and no volume is mounted there"
        yield finding("config-file", job.manifest, message, "a volumeMount of the ConfigMap", "warning")
        return
    volume = _volume(job, mount)
    name = dig(volume, "configMap", "name")
    config_map = next((item for item in select_kinds(manifests, "ConfigMap") if item.name == name), None)
    if config_map is None:
        return
    key = _key(mount, volume, path)
    texts = mapping(config_map.get("data"))
    if key not in texts:
        message = f"the command reads {path}, and {config_map.kind}/{name} has {', '.join(texts) or 'no data'}"
        yield finding("config-file", job.manifest, message, did_you_mean(key, texts, "a key of the ConfigMap"))
        return
    try:
        config, _ = read_text(str(texts[key]), key, [word for word in words[words.index(path) + 1 :] if "=" in word])
    except DeepspeedConfigError:  # its JSON may be on the shared file system
        return
    except UserError as error:
        yield finding("config-file", config_map, str(error), "correct the config, and render again")
        return
    yield from _device(job, config)
    yield from _directories(job, config)
    yield from _sources(job, config)


def _mount(job: JobView, path: str) -> dict[str, Any] | None:
    """Return the volumeMount of the container `node` that holds `path`: the one with the longest mount path."""
    mounts = {str(mount.get("mountPath")): mount for mount in job.mounts}  # a patch replaces the mount of its path
    covering = [where for where in mounts if PurePosixPath(path).is_relative_to(where)]
    return mounts[max(covering, key=len)] if covering else None


def _volume(job: JobView, mount: dict[str, Any]) -> dict[str, Any]:
    named = [volume for volume in job.volumes if volume.get("name") == mount.get("name")]
    return named[-1] if named else {}


def _key(mount: dict[str, Any], volume: dict[str, Any], path: str) -> str:
    """Return the key of the ConfigMap that appears at `path` in the container."""
    below = mount.get("subPath") or str(PurePosixPath(path).relative_to(str(mount.get("mountPath"))))
    items = [mapping(item) for item in listed(dig(volume, "configMap", "items"))]
    return next((str(item.get("key")) for item in items if item.get("path") == below), str(below))


def _device(job: JobView, config: RunConfig) -> Iterator[RuleFinding]:
    device, gpus = config.launch.device, job.count(GPU)
    return failures(
        job.manifest,
        Check(
            device == "cuda" and not gpus,
            "processes",
            "launch.device is cuda, and the pods ask for no GPU",
            f"{GPU} in requests and limits, or launch.device: cpu",
        ),
        Check(
            device == "cpu" and gpus,
            "gpu-unused",
            f"launch.device is cpu, and the pods ask for {GPU}: {gpus}",
            "launch.device: cuda, or CPU nodes",
        ),
    )


def _directories(job: JobView, config: RunConfig) -> Iterator[RuleFinding]:
    """Check that results and cache are on a volume that outlives the pods and that the pods may write."""
    directories = {"run.directory": config.run.directory, "data.cache_directory": config.data.cache_directory}
    for key, path in directories.items():
        if path is None or not path.is_absolute():
            continue
        mount = _mount(job, path.as_posix())
        volume = {} if mount is None else _volume(job, mount)
        lost = next((kind for kind in _LOST_WITH_THE_POD if kind in volume), None)
        fix = "a volumeMount of the shared claim"
        if mount is None or lost is not None:
            where = "no volume is mounted there" if mount is None else f"{lost} is lost with its pod"
            yield finding("not-shared", job.manifest, f"{key} is {path}, and {where}", fix)
        elif mount.get("readOnly") or dig(volume, "persistentVolumeClaim", "readOnly"):
            yield finding("not-shared", job.manifest, f"{key} is {path}, which is mounted read-only", "readOnly: false")


def _sources(job: JobView, config: RunConfig) -> Iterator[RuleFinding]:
    """Check that files to read are on a volume; without one, they can only be in the image."""
    sources = [*config.data.every_path(), ("model.path", config.model.path), ("data.tokenizer", config.data.tokenizer)]
    for key, path in sources:
        if path is not None and path.startswith("/") and _mount(job, path) is None:
            message = f"{key} is {path}, and no volume is mounted there"
            yield finding("not-shared", job.manifest, message, "a path on the shared file system", "warning")
