"""Rules about a run's config, which a manifest cannot show: what the trainer will do once its pods run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.job import Job

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
    yield from _paths(job)


def _paths(job: Job) -> Iterator[RuleFinding]:
    """What the pods read and write must lie on the shared file system; a hub id, a dataset's name lie nowhere."""
    config, mount = job.config, PurePosixPath(job.section.storage.mount_path)
    # Python's own texts are in the image.
    local = [(key, value) for key, value in config.data.every_path() if value != "stdlib"]
    if config.checkpoint.resume not in ("auto", "never") and "://" not in config.checkpoint.resume:
        local.append(("checkpoint.resume", config.checkpoint.resume))
    names = [("model.path", config.model.path), ("data.tokenizer", config.data.tokenizer)]
    # A name that could be one of the hub is taken for a path where it is one here, as training here would.
    local += [(key, value) for key, value in names if value is not None and _is_path(value)]
    for key, value in [("run.directory", str(config.run.directory)), *local]:
        if value.startswith("/"):
            if not PurePosixPath(value).is_relative_to(mount):
                yield finding("not-shared", key, f"{value} is not below {mount}", f"a path below {mount}")
        elif key != "run.directory":  # that one is put below the mount
            yield finding(
                "not-shared", key, f"{value} is relative: the pods start in their image's directory",
                f"copy it to the file system and give {mount / PurePosixPath(value.lstrip('./~'))}",
            )  # fmt: skip


def _is_path(value: str) -> bool:
    return value.startswith(("/", ".", "~")) or value.count("/") > 1 or Path(value).exists()
