"""Rules about the config of a run: problems that manifests do not show and that would only appear in running pods."""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath

from aliquot.cluster.findings import Check, RuleFinding, failures
from aliquot.cluster.job import Job
from aliquot.cluster.quantity import GIB

_SPOT_NOTICE_S = 120
_SPOT_GRACE_S = 90  # of the notice, less the time that the kubelet has beside the trainer
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
    is_in_time = needed_s <= _SPOT_GRACE_S
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
            spot and job.grace_s > _SPOT_NOTICE_S and is_in_time, "grace",
            f"{settings.grace_s:g} s; a spot node is gone {_SPOT_NOTICE_S} s after its notice",
            f"checkpoint.grace_s: {_SPOT_GRACE_S}", "warning",
        )),
        ("checkpoint.grace_s", Check(
            needed_s > settings.grace_s and (not spot or is_in_time), "grace",
            f"{settings.grace_s:g} s; a step and a save take {needed_s:.0f} s by the plan ({rate})",
            f"checkpoint.grace_s: at least {math.ceil(needed_s)}, or a faster file system (cluster.storage)", "warning",
        )),
        ("checkpoint.every", Check(
            spot and not is_in_time and repeated > _MUCH_REPEATED, "grace",
            f"a step and a save take {needed_s:.0f} s by the plan ({rate}), and a spot node is gone {_SPOT_NOTICE_S} s"
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
