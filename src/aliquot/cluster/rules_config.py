"""Rules about a run's config, which a manifest cannot show: what the trainer will do once its pods run."""

from __future__ import annotations

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
        yield finding(
            "no-checkpoints", "checkpoint.every", "0: saved only at the end" + (", on spot nodes" if spot else ""),
            "checkpoint.every: as many steps as you can afford to lose", "error" if spot else "warning",
        )  # fmt: skip
    if "spot" in section.capacity and job.grace_s > _SPOT_NOTICE_S:
        yield finding(
            "grace", "checkpoint.grace_s",
            f"{config.checkpoint.grace_s:g} s; a spot node is gone {_SPOT_NOTICE_S} s after its notice",
            "at most 90 on spot nodes", "warning",
        )  # fmt: skip
    yield from _saves(job)
    yield from _processors(job)
    yield from _credentials(job)
    yield from _paths(job)


def _saves(job: Job) -> Iterator[RuleFinding]:
    """What the plan says of a checkpoint against the time and the room that it has."""
    plan, settings, storage = job.plan, job.config.checkpoint, job.section.storage
    needed_s = plan.step_s + plan.save_s
    if needed_s > settings.grace_s:
        yield finding(
            "grace", "checkpoint.grace_s",
            f"{settings.grace_s:g} s; a step and a save take {needed_s:.0f} s by the plan"
            f" ({plan.checkpoint_bytes / 1e9:.0f} GB, {plan.storage_bytes_per_s / 1e9:.2g} GB/s)",
            "that long, where nodes wait so long, or a file system that is faster (larger: cluster.storage)", "warning",
        )  # fmt: skip
    at_once = settings.keep + settings.best + 1  # a new one is complete before an old one goes
    wanted = at_once * plan.checkpoint_bytes + plan.export_bytes
    if storage.kind != "claim" and wanted > storage.size_gib * GIB:
        yield finding(
            "storage-size", "cluster.storage.size_gib",
            f"{storage.size_gib} GiB; {at_once} checkpoints and the export take {wanted / GIB:.0f}",
            "a larger file system, or a smaller checkpoint.keep",
        )  # fmt: skip


def _processors(job: Job) -> Iterator[RuleFinding]:
    first = job.types[0]
    for other in job.types[1:]:
        if not job.gpus and (other.cpu_manufacturer, other.generation) != (first.cpu_manufacturer, first.generation):
            yield finding(
                "unequal-nodes", "cluster.instance_types",
                f"{first.name} and {other.name} have different processors, and the plan's times are of the first",
                "types of one generation and one manufacturer",
            )  # fmt: skip


def _credentials(job: Job) -> Iterator[RuleFinding]:
    """Pods do not reach the node's own role: httpPutResponseHopLimit is 1."""
    config = job.config
    for key, value in (
        ("checkpoint.mirror", config.checkpoint.mirror),
        ("checkpoint.resume", config.checkpoint.resume),
    ):
        if value is not None and value.startswith("s3://") and job.section.service_account is None:
            yield finding(
                "credentials", key, f"{value} without cluster.service_account",
                "a service account with an IAM role (EKS Pod Identity or IRSA); none where the namespace's default has"
                " one",
            )  # fmt: skip


def _paths(job: Job) -> Iterator[RuleFinding]:
    """What the pods read and write must lie on the shared file system; a hub id, a dataset's name lie nowhere."""
    config, mount = job.config, PurePosixPath(job.section.storage.mount_path)
    # Python's own texts are in the image.
    local = [(key, value) for key, value in config.data.every_path() if value != "stdlib"]
    if config.checkpoint.resume not in ("auto", "never") and "://" not in config.checkpoint.resume:
        local.append(("checkpoint.resume", config.checkpoint.resume))
    if (mirror := config.checkpoint.mirror) is not None and (mirror.startswith("file://") or "://" not in mirror):
        local.append(("checkpoint.mirror", mirror.removeprefix("file://")))
    template = config.data.chat_template
    if template is not None and template != "none" and "{" not in template:  # a file's name, not the template itself
        local.append(("data.chat_template", template))
    names = [("model.path", config.model.path), ("data.tokenizer", config.data.tokenizer)]
    if config.adapter is not None and config.adapter.path is not None:
        names.append(("adapter.path", str(config.adapter.path)))
    # A name that could be one of the hub is taken for a path where it is one here, as training here would.
    local += [(key, value) for key, value in names if value is not None and _is_path(value)]
    made = [("run.directory", config.run.directory), ("data.cache_directory", config.data.cache_directory)]
    # Those two are put below the mount.
    written = [(key, str(mount / path.as_posix())) for key, path in made if path is not None]
    for key, value in [*written, *local]:
        if "://" in value:
            yield finding(
                "not-shared", key, f"{value} is not read from there",
                f"copy it to the file system and give its path below {mount}",
            )  # fmt: skip
        elif value.startswith("/"):
            if not PurePosixPath(posixpath.normpath(value)).is_relative_to(mount):
                yield finding("not-shared", key, f"{value} is not below {mount}", f"a path below {mount}")
        else:
            yield finding(
                "not-shared", key, f"{value} is relative: the pods start in their image's directory",
                f"copy it to the file system and give {mount / PurePosixPath(value.lstrip('./~'))}",
            )  # fmt: skip


def _is_path(value: str) -> bool:
    return value.startswith(("/", ".", "~")) or value.count("/") > 1 or Path(value).exists()
