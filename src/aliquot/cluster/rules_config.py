"""Rules about the config of a run: problems that would only appear in running pods, and the config that a job mounts.

Of a mounted config, the rules check whether the pods find it, where it writes, and whether it is the planned one.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

from aliquot.catalogue.instances import SPOT_GRACE_S, SPOT_NOTICE_S
from aliquot.cluster.findings import Check, RuleFinding, did_you_mean, failures, finding
from aliquot.cluster.job import Job
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, select_kinds
from aliquot.cluster.pod import RENDERED_FILE
from aliquot.cluster.quantity import GIB
from aliquot.config.read_config import read_text
from aliquot.config.schema import RunConfig
from aliquot.core.decode import decode_json
from aliquot.core.errors import DeepspeedConfigError, UserError

_SPOT_LOSSES_A_SECOND = 0.2 / (30 * 86400)  # of a node; assumed, as in the offers of `aliquot plan --tokens`
_MUCH_REPEATED = 0.01  # of the time of a run
_NO_PATHS = ("stdlib", "auto", "never")
_GATED = ("meta-llama/", "google/gemma")  # of the hub, which asks for a token
_FSSPEC = {"gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}  # schemes of URLs, with their packages

_Row = tuple[str, Check]  # the key that a finding names, and the check


def check_config(job: Job) -> Iterator[RuleFinding]:
    for where, check in (*_settings(job), *_saves(job), *_packages(job), *_keys(job)):
        yield from failures(where, check)
    yield from _paths(job)


def _settings(job: Job) -> list[_Row]:
    config, observe, types = job.config, job.config.observe, job.types
    kinds = {(node_type.cpu_manufacturer, node_type.generation) for node_type in types}
    plan_fix = f"aliquot plan CONFIG --instance {types[0].name} --optimize time"
    return [
        ("checkpoint.resume", Check(
            config.checkpoint.resume == "never" and job.section.max_restarts > 0, "resume",
            "never, with cluster.max_restarts > 0", "checkpoint.resume: auto",
        )),
        ("cluster.instance_types", Check(
            len(kinds) > 1 and not job.gpus, "unequal-nodes",
            f"{types[0].name} and {types[-1].name} have different processors, and the plan's times are of the first",
            "types of one generation and one manufacturer",
        )),
        ("cluster.zone", Check(
            job.section.storage.kind == "fsx-static" and job.section.zone is None, "zone-spread",
            "not set, so nodes may be in another zone than the file system", "the zone of the file system",
        )),
        ("observe.prometheus_host", Check(
            observe.prometheus is not None and observe.prometheus_host in ("127.0.0.1", "localhost"), "network-policy",
            f"{observe.prometheus_host}: nobody outside of the pod reaches its metrics",
            "observe.prometheus_host: 0.0.0.0; the NetworkPolicy opens the port", "warning",
        )),
        *(("the plan", Check(True, "plan", concern, plan_fix)) for concern in job.plan.concerns),
    ]  # fmt: skip


def _saves(job: Job) -> list[_Row]:
    """Check that a checkpoint can be saved within the grace period, and that the kept checkpoints fit the storage."""
    plan, settings, storage = job.plan, job.config.checkpoint, job.section.storage
    spot, is_fsx = "spot" in job.section.capacity, storage.kind != "claim"
    rate = f"{plan.checkpoint_bytes / 1e9:.0f} GB, {plan.storage_bytes_per_s / 1e9:.2g} GB/s"
    needed_s, interval_s = plan.step_s + plan.save_s, plan.save_steps * plan.step_s
    is_in_time = needed_s <= SPOT_GRACE_S
    repeated = plan.nodes * _SPOT_LOSSES_A_SECOND * (interval_s or plan.total_s) / 2
    count = settings.keep + settings.best + 1  # a new checkpoint is complete before retention removes an old one
    needed_bytes = count * plan.checkpoint_bytes + plan.export_bytes
    return [
        ("checkpoint.every", Check(
            settings.every == 0, "no-checkpoints", f"0: saved only at the end{', on spot nodes' if spot else ''}",
            "checkpoint.every: auto", "error" if spot else "warning",
        )),
        ("checkpoint.every", Check(
            0 < interval_s < plan.save_s, "storage-speed",
            f"a save takes {plan.save_s:.0f} s ({rate}), and the next one is due after {interval_s:.0f} s",
            f"checkpoint.every: at least {math.ceil(plan.save_s / plan.step_s)}, or a faster file system",
        )),
        ("checkpoint.grace_s", Check(
            spot and job.grace_s > SPOT_NOTICE_S and is_in_time, "grace",
            f"{settings.grace_s:g} s; a spot node is gone {SPOT_NOTICE_S} s after its notice",
            f"checkpoint.grace_s: {SPOT_GRACE_S}", "warning",
        )),
        ("checkpoint.grace_s", Check(
            needed_s > settings.grace_s and (not spot or is_in_time), "grace",
            f"{settings.grace_s:g} s; a step and a save take {needed_s:.0f} s by the plan ({rate})",
            f"checkpoint.grace_s: at least {math.ceil(needed_s)}, or a faster file system (cluster.storage)", "warning",
        )),
        ("checkpoint.every", Check(
            spot and not is_in_time and repeated > _MUCH_REPEATED, "grace",
            f"a step and a save take {needed_s:.0f} s by the plan ({rate}), and a spot node is gone {SPOT_NOTICE_S} s"
            f" after its notice: repeated steps take {repeated:.0%} of the run, whatever checkpoint.grace_s is",
            "save more often (checkpoint.every), a faster file system (cluster.storage), or on-demand nodes", "warning",
        )),
        ("cluster.storage", Check(
            is_fsx and storage.deployment_type == "SCRATCH_2" and settings.mirror is None, "storage-safety",
            "SCRATCH_2 is not replicated, and checkpoints are nowhere else",
            "checkpoint.mirror: s3://..., or storage.deployment_type: PERSISTENT_2",
        )),
        ("cluster.storage", Check(
            is_fsx and needed_bytes > storage.size_gib * GIB, "storage-size",
            f"size_gib is {storage.size_gib}; {count} checkpoints and the export take {needed_bytes / GIB:.0f}",
            "a larger file system, or a smaller checkpoint.keep",
        )),
    ]  # fmt: skip


def survives_spot(job: Job) -> bool:
    """Return whether the config asks for spot nodes, and its run goes on after an interruption."""
    settings = job.config.checkpoint
    return "spot" in job.section.capacity and settings.every != 0 and settings.resume != "never"


@cache
def _shipped_extras() -> dict[str, list[str]]:
    """Return the extras of the images; deploy/Dockerfile and deploy/Dockerfile.cuda install them from the same file."""
    return json.loads(files("aliquot.cluster").joinpath("image-extras.json").read_text())  # type: ignore[no-any-return]


def _urls(job: Job) -> list[tuple[str, str]]:
    """Return (key, URL) of everything that the pods read or write by a URL."""
    settings = job.config.checkpoint
    places = [("checkpoint.mirror", settings.mirror), ("checkpoint.resume", settings.resume)]
    return [(key, value) for key, value in (*places, *job.config.data.every_path()) if value and "://" in value]


def _packages(job: Job) -> list[_Row]:
    """Check that the image has the packages that the config needs."""
    config, extras = job.config, job.section.image_extras
    present = _shipped_extras()["cuda" if job.gpus else "cpu"] if extras is None else extras
    needs = {
        "shard.engine": "deepspeed" if job.plan.engine == "deepspeed" else None,
        "train.fp8": "fp8" if config.train.fp8 else None,
        "adapter": None if config.adapter is None else "lora",
        **{f"observe.report_to: {name}": name for name in config.observe.report_to if name != "tensorboard"},
        **{f"{key}: {url}": "s3" for key, url in _urls(job) if url.startswith("s3://")},
    }
    packages = [(key, url, _FSSPEC.get(url.partition("://")[0])) for key, url in _urls(job)]
    return [
        *((key, Check(
            extra is not None and extra not in present, "image-packages",
            f"needs the extra {extra}, which the image does not have",
            f"--build-arg EXTRAS={','.join([*present, str(extra)])}, and the same in cluster.image_extras",
        )) for key, extra in needs.items()),
        *((key, Check(
            package, "image-packages", f"{url} needs {package}, which no extra brings", f"an image with {package}",
            "warning",
        )) for key, url, package in packages),
    ]  # fmt: skip


def _keys(job: Job) -> list[_Row]:
    """Check that the pods have the keys for S3, gated models and dashboards.

    They cannot use the role of their node, because httpPutResponseHopLimit is 1 in the node class.
    """
    model, section = job.config.model.path or "", job.section
    role = "a service account with an IAM role (EKS Pod Identity or IRSA); none where the namespace's default has one"
    return [
        *((key, Check(
            url.startswith("s3://") and section.service_account is None, "credentials",
            f"{url} without cluster.service_account", role,
        )) for key, url in _urls(job)),
        ("model.path", Check(
            model.startswith(_GATED) and section.huggingface_secret is None, "credentials",
            f"{model} is gated: the hub asks for the token of an account that has accepted its licence",
            "kubectl create secret generic hf-token --from-literal=token=..., and huggingface_secret: {name: hf-token}",
        )),
        ("observe.report_to", Check(
            "wandb" in job.config.observe.report_to and "WANDB_API_KEY" not in section.secrets, "credentials",
            "wandb without a key, for which pods cannot ask", "cluster.secrets: {WANDB_API_KEY: {name: ..., key: ...}}",
        )),
    ]  # fmt: skip


def _paths(job: Job) -> Iterator[RuleFinding]:
    """Check that the pods read and write files only on the shared file system."""
    config, mount = job.config, PurePosixPath(job.section.storage.mount_path)
    places = [
        *config.data.every_path(),
        ("checkpoint.resume", config.checkpoint.resume),
        ("checkpoint.mirror", config.checkpoint.mirror),
        ("data.chat_template", config.data.chat_template_path),
    ]
    # `stdlib`, the documentation of Python's standard library, is in the container image.
    paths = [(key, value.removeprefix("file://")) for key, value in places if value not in (None, *_NO_PATHS)]
    local = [(key, value) for key, value in paths if "://" not in value]
    adapter = None if config.adapter is None or config.adapter.path is None else str(config.adapter.path)
    names = [("model.path", config.model.path), ("data.tokenizer", config.data.tokenizer), ("adapter.path", adapter)]
    # A name that could also be a hub id counts as a path if the path exists on this machine, as in a local run.
    local += [
        (key, value)
        for key, value in names
        if value is not None and (value.startswith(("/", ".", "~")) or value.count("/") > 1 or Path(value).exists())
    ]
    made = [("run.directory", config.run.directory), ("data.cache_directory", config.data.cache_directory)]
    # `shipped_config` moves these two directories below the mount path.
    written = [(key, str(mount / path.as_posix())) for key, path in made if path is not None]
    for key, value in [*written, *local]:
        is_url, is_absolute = "://" in value, value.startswith("/")
        is_below = PurePosixPath(posixpath.normpath(value)).is_relative_to(mount)
        yield from failures(
            key,
            Check(is_url, "not-shared", f"{value} is not read from there",
                  f"copy it to the file system and give its path below {mount}"),
            Check(is_absolute and not is_url and not is_below, "not-shared", f"{value} is not below {mount}",
                  f"a path below {mount}"),
            Check(not is_absolute and not is_url, "not-shared",
                  f"{value} is relative: the pods start in their image's directory",
                  f"copy it to the file system and give {mount / PurePosixPath(value.lstrip('./~'))}"),
        )  # fmt: skip


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
