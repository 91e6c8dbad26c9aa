"""Rules about a run's config, which a manifest cannot show: what the trainer will do once its pods run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from aliquot.cluster.findings import Finding, finding
from aliquot.cluster.job import Job

_SPOT_NOTICE_S = 120


def check_config(job: Job) -> Iterator[Finding]:
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
    mount = PurePosixPath(section.storage.mount_path)
    places = {"run.directory": str(config.run.directory), "model.path": config.model.path or ""}
    paths = [config.data.path] if isinstance(config.data.path, str) else config.data.path or []
    for key, value in [*places.items(), *(("data.path", path) for path in paths)]:
        absolute = value.startswith("/")
        if absolute and not PurePosixPath(value).is_relative_to(mount):
            yield finding("not-shared", key, f"{value} is not below {mount}", f"a path below {mount}")
        if key == "data.path" and not absolute and value != "stdlib":
            yield finding(
                "not-shared", key, f"{value} is relative: the pods start in their image's directory",
                f"copy it to the file system and give {mount / value}",
            )  # fmt: skip
