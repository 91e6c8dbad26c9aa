"""Rules about the config of a run: problems that manifests do not show and that would only appear in running pods."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from aliquot.cluster.findings import Check, RuleFinding, failures, finding
from aliquot.cluster.job import Job
from aliquot.cluster.quantity import GIB

_SPOT_NOTICE_S = 120


def check_config(job: Job) -> Iterator[RuleFinding]:
    config, spot, types = job.config, "spot" in job.section.capacity, job.types
    kinds = {(node_type.cpu_manufacturer, node_type.generation) for node_type in types}
    plan_fix = f"aliquot plan CONFIG --instance {types[0].name} --optimize time"
    yield from failures(
        "checkpoint.resume",
        Check(
            config.checkpoint.resume == "never" and job.section.max_restarts > 0,
            "resume",
            "never, with cluster.max_restarts > 0",
            "checkpoint.resume: auto",
        ),
    )
    yield from failures(
        "cluster.instance_types",
        Check(
            len(kinds) > 1 and not job.gpus,
            "unequal-nodes",
            f"{types[0].name} and {types[-1].name} have different processors, and the plan's times are of the first",
            "types of one generation and one manufacturer",
        ),
        Check(
            0 < job.gpus < types[0].gpus,
            "gpu-unused",
            f"the run uses {job.gpus} of {types[0].gpus} GPUs of each {types[0].name}",
            "cluster.ranks_per_node: auto, or a smaller type",
        ),
    )
    yield from failures(
        "cluster.zone",
        Check(
            job.section.storage.kind == "fsx-static" and job.section.zone is None,
            "zone-spread",
            "not set, so nodes may be in another zone than the file system",
            "the zone of the file system",
        ),
    )
    yield from failures(
        "observe.prometheus_host",
        Check(
            config.observe.prometheus is not None and config.observe.prometheus_host in ("127.0.0.1", "localhost"),
            "network-policy",
            f"{config.observe.prometheus_host}: nobody outside of the pod reaches its metrics",
            "observe.prometheus_host: 0.0.0.0; the NetworkPolicy opens the port",
            "warning",
        ),
    )
    yield from failures("the plan", *(Check(True, "plan", concern, plan_fix) for concern in job.plan.concerns))
    yield from _saves(job, spot)
    yield from _credentials(job)
    yield from _paths(job)


def _saves(job: Job, spot: bool) -> Iterator[RuleFinding]:
    """Check that a checkpoint can be saved within the grace period, and that the kept checkpoints fit the storage."""
    plan, settings, storage = job.plan, job.config.checkpoint, job.section.storage
    rate = f"{plan.checkpoint_bytes / 1e9:.0f} GB, {plan.storage_bytes_per_s / 1e9:.2g} GB/s"
    needed_s, interval_s = plan.step_s + plan.save_s, plan.save_steps * plan.step_s
    count = settings.keep + settings.best + 1  # a new checkpoint is complete before retention removes an old one
    needed_bytes = count * plan.checkpoint_bytes + plan.export_bytes
    yield from failures(
        "checkpoint.every",
        Check(
            settings.every == 0,
            "no-checkpoints",
            "0: saved only at the end" + (", on spot nodes" if spot else ""),
            "checkpoint.every: auto",
            "error" if spot else "warning",
        ),
        Check(
            0 < interval_s < plan.save_s,
            "storage-speed",
            f"a save takes {plan.save_s:.0f} s ({rate}), and the next one is due after {interval_s:.0f} s",
            f"checkpoint.every: at least {math.ceil(plan.save_s / plan.step_s)}, or a faster file system",
        ),
    )
    yield from failures(
        "checkpoint.grace_s",
        Check(
            spot and job.grace_s > _SPOT_NOTICE_S,
            "grace",
            f"{settings.grace_s:g} s; a spot node is gone {_SPOT_NOTICE_S} s after its notice",
            "at most 90 on spot nodes",
            "warning",
        ),
        Check(
            needed_s > settings.grace_s,
            "grace",
            f"{settings.grace_s:g} s; a step and a save take {needed_s:.0f} s by the plan ({rate})",
            "a longer checkpoint.grace_s where the nodes wait as long, or a faster file system (cluster.storage)",
            "warning",
        ),
    )
    yield from failures(
        "cluster.storage",
        Check(
            storage.kind != "claim" and storage.deployment_type == "SCRATCH_2" and settings.mirror is None,
            "storage-safety",
            "SCRATCH_2 is not replicated, and checkpoints are nowhere else",
            "checkpoint.mirror: s3://..., or storage.deployment_type: PERSISTENT_2",
        ),
        Check(
            storage.kind != "claim" and needed_bytes > storage.size_gib * GIB,
            "storage-size",
            f"size_gib is {storage.size_gib}; {count} checkpoints and the export take {needed_bytes / GIB:.0f}",
            "a larger file system, or a smaller checkpoint.keep",
        ),
    )


def _credentials(job: Job) -> Iterator[RuleFinding]:
    """Check that pods which use S3 have an IAM role.

    They cannot use the role of their node, because httpPutResponseHopLimit is 1 in the node class.
    """
    settings = job.config.checkpoint
    fix = "a service account with an IAM role (EKS Pod Identity or IRSA); none where the namespace's default has one"
    urls = [("checkpoint.mirror", settings.mirror), ("checkpoint.resume", settings.resume)]
    for key, value in (*urls, *job.config.data.every_path()):
        if value is not None and value.startswith("s3://") and job.section.service_account is None:
            yield finding("credentials", key, f"{value} without cluster.service_account", fix)


def _paths(job: Job) -> Iterator[RuleFinding]:
    """Check that the pods read and write files only on the shared file system."""
    config, mount = job.config, PurePosixPath(job.section.storage.mount_path)
    # `stdlib`, the documentation of Python's standard library, is in the container image.
    local = [(key, value) for key, value in config.data.every_path() if value != "stdlib" and "://" not in value]
    if config.checkpoint.resume not in ("auto", "never") and "://" not in config.checkpoint.resume:
        local.append(("checkpoint.resume", config.checkpoint.resume))
    if (mirror := config.checkpoint.mirror) is not None and (mirror.startswith("file://") or "://" not in mirror):
        local.append(("checkpoint.mirror", mirror.removeprefix("file://")))
    if (template := config.data.chat_template_path) is not None:
        local.append(("data.chat_template", template))
    names = [("model.path", config.model.path), ("data.tokenizer", config.data.tokenizer)]
    if config.adapter is not None and config.adapter.path is not None:
        names.append(("adapter.path", str(config.adapter.path)))
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
        if "://" in value:
            fix = f"copy it to the file system and give its path below {mount}"
            yield finding("not-shared", key, f"{value} is not read from there", fix)
        elif value.startswith("/"):
            if not PurePosixPath(posixpath.normpath(value)).is_relative_to(mount):
                yield finding("not-shared", key, f"{value} is not below {mount}", f"a path below {mount}")
        else:
            fix = f"copy it to the file system and give {mount / PurePosixPath(value.lstrip('./~'))}"
            yield finding("not-shared", key, f"{value} is relative: the pods start in their image's directory", fix)
