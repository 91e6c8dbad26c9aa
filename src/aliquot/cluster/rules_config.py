"""Rules about the config of a run: problems that manifests do not show and that would only appear in running pods."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.job import Job
from aliquot.cluster.quantity import GIB

_SPOT_NOTICE_S = 120


def check_config(job: Job) -> Iterator[RuleFinding]:
    config, section = job.config, job.section
    if config.checkpoint.resume == "never" and section.max_restarts > 0:
        yield finding("resume", "checkpoint.resume", "never, with cluster.max_restarts > 0", "checkpoint.resume: auto")
    if config.checkpoint.every == 0:
        spot = "spot" in section.capacity
        message = "0: saved only at the end" + (", on spot nodes" if spot else "")
        yield finding(
            "no-checkpoints", "checkpoint.every", message, "checkpoint.every: auto", "error" if spot else "warning"
        )
    if "spot" in section.capacity and job.grace_s > _SPOT_NOTICE_S:
        message = f"{config.checkpoint.grace_s:g} s; a spot node is gone {_SPOT_NOTICE_S} s after its notice"
        yield finding("grace", "checkpoint.grace_s", message, "at most 90 on spot nodes", "warning")
    for concern in job.plan.concerns:
        yield finding(
            "plan", "the plan", concern, f"aliquot plan CONFIG --instance {job.types[0].name} --optimize time"
        )
    yield from _saves(job)
    yield from _processors(job)
    yield from _credentials(job)
    yield from _paths(job)


def _saves(job: Job) -> Iterator[RuleFinding]:
    """Check that a checkpoint can be saved within the grace period, and that the kept checkpoints fit the storage."""
    plan, settings, storage = job.plan, job.config.checkpoint, job.section.storage
    rate = f"{plan.checkpoint_bytes / 1e9:.0f} GB, {plan.storage_bytes_per_s / 1e9:.2g} GB/s"
    needed_s = plan.step_s + plan.save_s
    if needed_s > settings.grace_s:
        message = f"{settings.grace_s:g} s; a step and a save take {needed_s:.0f} s by the plan ({rate})"
        fix = "a longer checkpoint.grace_s where the nodes wait as long, or a faster file system (cluster.storage)"
        yield finding("grace", "checkpoint.grace_s", message, fix, "warning")
    interval_s = plan.save_steps * plan.step_s
    if 0 < interval_s < plan.save_s:
        message = f"a save takes {plan.save_s:.0f} s ({rate}), and the next one is due after {interval_s:.0f} s"
        fix = f"checkpoint.every: at least {math.ceil(plan.save_s / plan.step_s)}, or a faster file system"
        yield finding("storage-speed", "checkpoint.every", message, fix)
    if storage.kind == "claim":
        return
    count = settings.keep + settings.best + 1  # a new checkpoint is complete before retention removes an old one
    needed_bytes = count * plan.checkpoint_bytes + plan.export_bytes
    if storage.deployment_type == "SCRATCH_2" and settings.mirror is None:
        yield finding(
            "storage-safety", "cluster.storage", "SCRATCH_2 is not replicated, and checkpoints are nowhere else",
            "checkpoint.mirror: s3://..., or storage.deployment_type: PERSISTENT_2",
        )  # fmt: skip
    if needed_bytes > storage.size_gib * GIB:
        message = f"{storage.size_gib} GiB; {count} checkpoints and the export take {needed_bytes / GIB:.0f}"
        yield finding(
            "storage-size", "cluster.storage.size_gib", message, "a larger file system, or a smaller checkpoint.keep"
        )


def _processors(job: Job) -> Iterator[RuleFinding]:
    first = job.types[0]
    for other in job.types[1:] if not job.gpus else ():
        if (other.cpu_manufacturer, other.generation) != (first.cpu_manufacturer, first.generation):
            message = f"{first.name} and {other.name} have different processors, and the plan's times are of the first"
            yield finding(
                "unequal-nodes", "cluster.instance_types", message, "types of one generation and one manufacturer"
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
