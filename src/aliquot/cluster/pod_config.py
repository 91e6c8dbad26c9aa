"""The configuration as the pods read it: as planned, self-contained, and with every file on the shared file system."""

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
    """Nested values for `aliquot train`. Raises UserError where model.config names a file that cannot be read."""
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
    """What the trainer must be able to write to; `any_run`: beside the run of this job those of others."""
    values = shipped_config(job)
    own = PurePosixPath(values["run"]["directory"])
    found = [str(own.parent if any_run else own), values["data"]["cache_directory"]]
    if uses_hub(job):
        found.append(hub_cache(job))
    return found


def uses_hub(job: Job) -> bool:
    """Whether something is fetched from the Hugging Face hub: a name that is no absolute path."""
    config = job.config
    names = [config.model.path, config.data.tokenizer, *config.data.datasets()]
    return any(name is not None and not name.startswith("/") for name in names)


def hub_cache(job: Job) -> str:
    return _below(job.section.storage.mount_path, Path("huggingface"))


def _below(mount: str, path: Path) -> str:
    """A relative path is one on the shared file system."""
    return str(PurePosixPath(mount) / path.as_posix())


def _shape(file: Path) -> Any:
    try:
        return decode_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClusterError(f"model.config cannot be read: {error}", file) from None
