"""Write the configuration for the pods: as planned, self-contained, with every file on the shared file system."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from aliquot.cluster.job import Job
from aliquot.cluster.manifest_yaml import Document, to_yaml
from aliquot.cluster.node_manifests import labels
from aliquot.core.decode import decode_json
from aliquot.core.errors import ClusterError

CONFIG_DIRECTORY = "/etc/aliquot"
CONFIG_FILE = "config.yaml"
OFFLOAD_DIRECTORY = "/offload"  # on each node's own disk


def config_map(job: Job) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": config_map_name(job), "namespace": job.section.namespace, "labels": labels(job)},
        "data": {CONFIG_FILE: to_yaml(shipped_config(job))},
    }


def config_map_name(job: Job) -> str:
    return f"{job.name}-config"


def shipped_config(job: Job) -> dict[str, Any]:
    """Return the configuration for `aliquot train`. Raises UserError if model.config names an unreadable file."""
    config, plan, mount = job.config, job.plan, job.section.storage.mount_path
    values = config.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"cluster"})
    for section in ("run", "data", "launch", "shard", "observe"):
        values.setdefault(section, {})
    values["run"].update(name=config.run.name, directory=_below(mount, config.run.directory))
    values["data"]["cache_directory"] = _below(mount, config.data.cache_directory or Path("cache"))
    if isinstance(config.model.config, Path):
        values["model"]["config"] = _shape(config.model.config)
    values["launch"].update(
        device=plan.device,
        nodes=job.section.nodes if job.section.is_elastic else plan.nodes,
        ranks=plan.ranks_per_node,
        threads_per_rank=plan.threads_per_rank,
    )
    values["shard"]["engine"] = plan.engine
    if job.scratch_bytes:
        values["shard"]["offload_directory"] = OFFLOAD_DIRECTORY
    values["observe"]["console"] = "plain"  # a pod's log is no terminal
    return values


def directories(job: Job, any_run: bool = False) -> list[str]:
    """Return the directories that the trainer writes to; with `any_run` also for runs of other jobs."""
    values = shipped_config(job)
    run_directory = PurePosixPath(values["run"]["directory"])
    paths = [str(run_directory.parent if any_run else run_directory), values["data"]["cache_directory"]]
    if uses_hub(job):
        paths.append(hub_cache(job))
    return paths


def uses_hub(job: Job) -> bool:
    """Return whether the run uses the Hugging Face hub: for a name that is no absolute path."""
    config = job.config
    names = [config.model.path, config.data.tokenizer, *config.data.datasets()]
    return any(name is not None and not name.startswith("/") for name in names)


def hub_cache(job: Job) -> str:
    return _below(job.section.storage.mount_path, Path("huggingface"))


def _below(mount: str, path: Path) -> str:
    """Place a relative path on the shared file system."""
    return str(PurePosixPath(mount) / path.as_posix())


def _shape(file: Path) -> Any:
    try:
        return decode_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClusterError(f"model.config cannot be read: {error}", file) from None
