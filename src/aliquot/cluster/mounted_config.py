"""Check the config that a job mounts: whether the pods find it, where it writes, and whether it is the planned one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from aliquot.cluster.findings import Check, RuleFinding, did_you_mean, failures, finding
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, select_kinds
from aliquot.cluster.pod import RENDERED_FILE
from aliquot.config.read_config import read_text
from aliquot.config.schema import RunConfig
from aliquot.core.decode import decode_json
from aliquot.core.errors import DeepspeedConfigError, UserError

_SUFFIXES = (".yaml", ".yml")
_LOST_WITH_THE_POD = ("emptyDir", "ephemeral")
# The keys of a config on which memory, processes and the Job that makes directories depend, and those on which only the
# duration depends.
_PLANNED = (
    r"run\.directory|(model|shard|adapter)\..*|launch\.(device|ranks|nodes|threads_per_rank)"
    r"|data\.(cache_directory|sequence_length|packing)"
    r"|train\.(objective|.*batch.*|gradient.*|precision|fp8|optimizer_states|compile|freeze)"
)
_TIMED = r"train\.(max_steps|num_train_epochs|eval_steps)|checkpoint\.every"


def check_mounted_config(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    words = job.command
    path = next((word for word in words if word.startswith("/") and word.endswith(_SUFFIXES)), None)
    if job.runtime is None or path is None or not any("aliquot" in word for word in words):
        return
    mount, volume = job.mount(path) or ({}, {})
    name = dig(volume, "configMap", "name")
    config_map = next((item for item in select_kinds(manifests, "ConfigMap") if item.name == name), None)
    if config_map is None:  # also a config on the shared file system
        yield from failures(job.manifest, Check(
            not mount, "config-file", f"the command reads {path}, and no volume is mounted there",
            "a volumeMount of the ConfigMap", "warning",
        ), Check(
            name, "config-file",
            f"ConfigMap/{name} with {path} is not among the manifests: nothing is compared with config and plan",
            "check its file, too", "warning",
        ))  # fmt: skip
        return
    key = _key(mount, volume, path)
    texts = mapping(config_map.get("data"))
    if key not in texts:
        yield finding(
            "config-file",
            job.manifest,
            f"the command reads {path}, and {config_map.kind}/{name} has {', '.join(texts) or 'no data'}",
            did_you_mean(key, texts, "a key of the ConfigMap"),
        )
        return
    try:
        config, _ = read_text(str(texts[key]), key, [word for word in words[words.index(path) + 1 :] if "=" in word])
    except DeepspeedConfigError:  # its JSON may be on the shared file system
        return
    except UserError as error:
        yield finding("config-file", config_map, str(error), "correct the config, and render again")
        return
    yield from _directories(job, config)
    yield from _planned_config(config_map, config)


def _planned_config(config_map: ManifestObject, config: RunConfig) -> Iterator[RuleFinding]:
    """Compare the mounted config with the planned one, in the keys on which memory, time and processes depend."""
    changed: dict[str, str] = {}
    with suppress(UserError, ValueError, KeyError, TypeError):  # not rendered, or edited by hand
        planned = RunConfig.model_validate(decode_json(str(config_map.get("data")[RENDERED_FILE]))["config"])
        before, now = (item.model_dump(mode="json", by_alias=True) for item in (planned, config))
        for section, key in ((name, key) for name in now for key in mapping(now[name]) | mapping(before[name])):
            value, former = dig(now, section, key), dig(before, section, key)
            if value not in ("auto", former) and re.fullmatch(f"{_PLANNED}|{_TIMED}", f"{section}.{key}"):
                changed[f"{section}.{key}"] = f"{section}.{key} is {value}, and was planned as {former}"
    return failures(
        config_map,
        Check(
            changed,
            "planned-config",
            "; ".join(changed.values()),
            "change the run's config, and render again",
            "error" if any(re.fullmatch(_PLANNED, key) for key in changed) else "warning",
        ),
    )


def _key(mount: dict[str, Any], volume: dict[str, Any], path: str) -> str:
    """Return the key of the ConfigMap that appears at `path` in the container."""
    below = mount.get("subPath") or str(PurePosixPath(path).relative_to(str(mount.get("mountPath"))))
    items = [mapping(item) for item in listed(dig(volume, "configMap", "items"))]
    return next((str(item.get("key")) for item in items if item.get("path") == below), str(below))


def _directories(job: JobView, config: RunConfig) -> Iterator[RuleFinding]:
    """Check that results and cache are on a volume that outlives the pods and that the pods may write."""
    directories = {"run.directory": config.run.directory, "data.cache_directory": config.data.cache_directory}
    for key, path in directories.items():
        if path is None or not path.is_absolute():
            continue
        mount, volume = job.mount(path.as_posix()) or ({}, {})
        wrong = {
            "no volume is mounted there": not mount,
            "its volume is lost with its pod": any(kind in volume for kind in _LOST_WITH_THE_POD),
            "it is mounted read-only": mount.get("readOnly") or dig(volume, "persistentVolumeClaim", "readOnly"),
        }
        fix = "a volumeMount of the shared claim, without readOnly"
        checks = (
            Check(is_wrong, "not-shared", f"{key} is {path}: {reason}", fix) for reason, is_wrong in wrong.items()
        )
        yield from failures(job.manifest, *checks)
