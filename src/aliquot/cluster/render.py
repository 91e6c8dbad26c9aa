"""Render a config and its plan as a directory of Kubernetes manifests, and list the commands that use the directory.

The same input always gives the same files.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from aliquot.cluster.infrastructure import directory_job, node_class, node_pool, storage
from aliquot.cluster.job import Job
from aliquot.cluster.manifests import Document, ManifestObject, compact, parse_manifests, read_manifests, to_yaml
from aliquot.cluster.pod import config_map, network_policy
from aliquot.cluster.quantity import GIB
from aliquot.cluster.trainjob import cluster_training_runtime, train_job, training_runtime
from aliquot.core.errors import ClusterError, StorageError
from aliquot.core.number_format import count_of, dollars

KUSTOMIZATION = "kustomization.yaml"
_RUNTIME_FILE = "cluster-training-runtime.yaml"
_JOB_FILE = "train-job.yaml"


def documents(job: Job, runtime: bool = False) -> dict[str, Document]:
    """Return every object by its file name, in the order in which kubectl must create them.

    With `runtime`, the objects of the job itself are replaced by a ClusterTrainingRuntime, for jobs of other users.
    """
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": job.section.namespace}}
    objects = compact(
        **{
            "namespace.yaml": namespace if job.section.create_namespace else None,
            "node-class.yaml": node_class(job),
            "node-pool.yaml": node_pool(job),
            **storage(job),
            "directories-job.yaml": directory_job(job, any_run=runtime),
            "network-policy.yaml": network_policy(job, any_job=runtime),
        }
    )
    if runtime:
        return {**objects, _RUNTIME_FILE: cluster_training_runtime(job)}
    return {
        **objects,
        "config-map.yaml": config_map(job),
        "training-runtime.yaml": training_runtime(job),
        _JOB_FILE: train_job(job),
    }


def render(job: Job, version: str, runtime: bool = False) -> dict[str, str]:
    """Return the text of every file by name. `version` is the version of aliquot; for `runtime` see `documents`."""
    header = [f"Rendered by aliquot {version}; change the run's config and render again."]
    header += [] if runtime else [plan_line(job)]
    objects = documents(job, runtime)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(objects),
        # Keep this order. Otherwise kubectl would create the job before its runtime, which Trainer's webhook refuses.
        "sortOptions": {"order": "fifo"},
    }
    objects[KUSTOMIZATION] = kustomization
    return {name: to_yaml(document, header) for name, document in objects.items()}


def parsed(job: Job, runtime: bool = False) -> list[ManifestObject]:
    """Return the rendered objects in the form in which `cluster check` reads objects from files."""
    return [
        manifest
        for name, document in documents(job, runtime).items()
        for manifest in parse_manifests(to_yaml(document), name)
    ]


def plan_line(job: Job) -> str:
    plan = job.plan
    ranks = count_of(plan.ranks_per_node, "rank")
    threads = count_of(plan.threads_per_rank, "thread")
    step = f"{plan.step_s:.3g} s"
    length = f"{count_of(plan.steps, 'step')} of {step}" if plan.steps else f"a step takes {step}"
    cost = "" if plan.cost_usd is None or not plan.steps else f", {dollars(plan.cost_usd)} USD on demand"
    return (
        f"Plan: {plan.model}, engine {plan.engine}, {plan.nodes} x {job.types[0].name} x {ranks} x"
        f" {threads}; peak {plan.peak_bytes_per_rank / GIB:.1f} GiB of {plan.limit_bytes / GIB:.1f} GiB a rank"
        f" ({plan.peak.name}); {length}{cost}."
    )


def write(files: dict[str, str], directory: Path) -> None:
    """Write the files to `directory`. Other files there are kept, but kustomization.yaml does not list them.

    Raises ClusterError if the directory holds the manifests of another job.
    """
    for name in {_JOB_FILE, _RUNTIME_FILE} & files.keys():
        names = {manifest.name for manifest in parse_manifests(files[name], name)}
        for former in read_manifests(directory / name) if (directory / name).is_file() else ():
            if former.name not in names:
                raise ClusterError(
                    f"{directory} holds the manifests of another job, {former.name}: choose another directory with -o"
                )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the manifests: {error.strerror}", directory) from None


def commands(job: Job, directory: Path) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs for users: apply, status, log of rank 0, start again, and delete."""
    apply = f"kubectl apply --server-side -k {shlex.quote(str(directory))}"
    space = f"-n {job.section.namespace}"
    # The reclaim policy is Retain, so that a deleted claim deletes no checkpoints.
    keeps = (
        "; the file system and its bill stay: aws fsx delete-file-system"
        if job.section.storage.kind == "fsx-dynamic"
        else ""
    )
    delete = f"kubectl delete {space} trainjob/{job.name}"
    return [
        ("apply; repeat it if the server does not know the runtime yet", apply),
        ("status", f"aliquot cluster status {job.name} {space}"),
        ("log of rank 0", f"aliquot cluster logs {job.name} {space} -f"),
        # Trainer allows no change of an existing TrainJob, and does not start a failed one again.
        ("start again, from the newest checkpoint", f"{delete} --cascade=foreground && {apply}"),
        ("delete", f"{delete}   # keeps nodes until they are empty, and all data"),
        (f"delete all{keeps}", f"kubectl delete -k {shlex.quote(str(directory))}"),
    ]
