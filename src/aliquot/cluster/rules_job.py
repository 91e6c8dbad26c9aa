"""Rules about a TrainJob and its runtime, also compared with the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from aliquot.cluster.findings import Check, Field, RuleFinding, did_you_mean, failures, none_of, one_of
from aliquot.cluster.job import EFA, GPU, GRACE_MARGIN_S, Job
from aliquot.cluster.job_view import JobView, job_specs, patches
from aliquot.cluster.manifests import dig, listed, mapping
from aliquot.cluster.pod import ANCESTOR, NODE
from aliquot.cluster.quantity import GIB, MIB, parse
from aliquot.config.cluster_section import max_job_name_length
from aliquot.core.number_format import count_of
from aliquot.planner.plan import Plan

RESERVED_ENV = frozenset({"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"})

_SHM_DEFAULT_BYTES = 64 * MIB
_SHM_FIX = "an emptyDir {medium: Memory, sizeLimit: ...} at /dev/shm"
_DEADLINE = "activeDeadlineSeconds"


def _is_trainer(job: Any) -> bool:
    return bool(dig(job, "template", "metadata", "labels", ANCESTOR) == "trainer")


def _keeps_to_job_set(spec: Any) -> bool:
    """Return whether the pods of a Job leave restarts to the JobSet, whose webhook sets OnFailure by default."""
    policy = dig(spec, "template", "spec", "restartPolicy") or "OnFailure"
    return policy == "Never" or (policy == "OnFailure" and mapping(spec).get("podFailurePolicy") is None)


# What the controller and the webhooks of Trainer ask beyond the schemas. Source: kubeflow/trainer,
# pkg/runtime/core/trainingruntime.go and pkg/webhooks/trainingruntime_webhook.go.
_JOBS = "spec/template/spec/replicatedJobs"
_CONTAINERS = ("template", "spec", "template", "spec", "containers")
_PATCHED = (
    "spec/podTemplateOverrides/*/spec/containers/*",
    f"spec/runtimePatches/*/trainingRuntimeSpec/{_JOBS.removeprefix('spec/')}/*/{'/'.join(_CONTAINERS)}/*",
)
TRAIN_JOB_FIELDS = (
    *(Field(f"{path}/name", "container-name", one_of(NODE), f"name it {NODE!r}") for path in _PATCHED),
    *(Field(path, "node-env", lambda item: item.get("name") != NODE or not item.get("env"), "spec.trainer.env",
            "a patch has env for the container `node`") for path in _PATCHED),
    Field("spec/trainer/env/*/name", "reserved-env", none_of(*RESERVED_ENV), "leave it to the controller"),
)  # fmt: skip
RUNTIME_FIELDS = (
    Field("spec/mlPolicy", "no-trainer", lambda policy: mapping(policy).keys() - {"numNodes"}, "mlPolicy: {torch: {}}",
          "{path} names no framework"),
    Field(_JOBS, "container-name", lambda jobs: any(map(_is_trainer, jobs or ())),
          f"{ANCESTOR}: trainer in its template.metadata.labels", "no replicated job has the label of the trainer"),
    Field(f"{_JOBS}/*", "container-name", lambda job: not _is_trainer(job) or NODE in [
          dig(item, "name") for item in listed(dig(job, *_CONTAINERS))], f"name one {NODE!r}",
          "{path} has no container of the name that Trainer knows"),
    Field(f"{_JOBS}/*", "container-name", lambda job: not _is_trainer(job) or job.get("replicas", 1) == 1,
          "replicas: 1", "{path} has several replicas; the nodes of a job are spec.trainer.numNodes"),
    Field(f"{_JOBS}/*/template/spec", "restart-policy", _keeps_to_job_set, "restartPolicy: Never",
          "{path} has pods that restart by themselves"),
)  # fmt: skip


def check_job(job: JobView, twin: Job | None) -> Iterator[RuleFinding]:
    """Check a TrainJob; with the plan and the config of `twin`, the job from which it was rendered, if it is known."""
    plan, grace_s = (None, None) if twin is None else (twin.plan, twin.config.checkpoint.grace_s)
    parts = (_trainer(job, twin is not None), _processes(job, plan), _resources(job), _memory(job, plan), _image(job))
    return chain(*parts, _lifetime(job, grace_s), _efa(job, plan), _deadline(job, plan))


def _trainer(job: JobView, is_rendered: bool) -> Iterator[RuleFinding]:
    spec, known = mapping(job.manifest.get("spec")), [str(name) for name, _ in job_specs(job.runtime)]
    name, most = job.manifest.name, max_job_name_length(job.nodes)
    runtime = f"{dig(spec, 'runtimeRef', 'kind') or 'ClusterTrainingRuntime'}/{dig(spec, 'runtimeRef', 'name')}"
    yield from failures(
        job.manifest,
        Check(
            len(name) > most,
            "name-too-long",
            f"{len(name)} letters, and with {job.nodes} nodes it may have {most}",
            "a shorter metadata.name",
        ),
        Check("trainer" not in spec, "no-trainer", "spec.trainer is missing", "spec.trainer with numNodes and command"),
        Check(
            job.runtime is None,
            "runtime",
            f"runtimeRef names {runtime}, which is not among the manifests",
            did_you_mean(
                runtime, job.other_runtimes, "check its manifest, too; kustomization.yaml lists it", similarity=0.0
            ),
            "error" if is_rendered or job.other_runtimes else None,
        ),
        *(
            Check(
                job.runtime is not None and patched not in known,
                "container-name",
                f"patches {patched!r}, which the runtime does not have",
                did_you_mean(patched, known, "the name of a replicated job of the runtime", similarity=0.0),
            )
            for patched, _ in patches(job.manifest)
        ),
    )


def _processes(job: JobView, plan: Plan | None) -> Iterator[RuleFinding]:
    processes, gpus = job.processes, job.count(GPU)
    cpus = parse(job.requests.get("cpu", job.limits.get("cpu")))
    threads = 1 if plan is None else plan.threads_per_rank
    # Without numProcPerNode, Trainer 2.3 starts one process per GPU, or per requested CPU without GPUs. Trainer 2.1
    # starts one per CPU.
    is_one = processes is None and (cpus or 0) <= 1 and gpus == 0
    count = processes if isinstance(processes, int) and not isinstance(processes, bool) else 0
    planned = (0, 0) if plan is None else (plan.nodes, plan.ranks_per_node)
    yield from failures(
        job.manifest,
        Check(job.nodes < 1, "processes", f"numNodes is {job.nodes}: the job has no pod", "numNodes: 1 or more"),
        Check(not count and not is_one, "processes", f"numProcPerNode is {processes}", "numProcPerNode: an integer"),
        Check(
            gpus and count > gpus,
            "processes",
            f"{count} processes on {count_of(gpus, 'GPU')}",
            "numProcPerNode: one process for each GPU",
        ),
        Check(
            count and plan is not None and (job.nodes, count) != planned,
            "processes",
            f"{job.nodes} nodes x {count} processes; the plan has {planned[0]} x {planned[1]}",
            "render again, or plan for these",
        ),
        Check(
            cpus is not None and count * threads > cpus,
            "threads",
            f"{count} processes x {threads} threads on {float(cpus or 0):g} CPUs",
            "fewer processes, launch.threads_per_rank, or a larger type",
        ),
    )


def _resources(job: JobView) -> Iterator[RuleFinding]:
    """Check requests and limits: whole devices (`domain/name`), bytes with a unit, equal values."""
    # aliquot's runtimes request one CPU, so that Trainer starts one process per node.
    is_runtimes_cpu = job.processes is None and job.requests.get("cpu") == "1"
    names = {"cpu", "memory"} | set(map(str, job.requests.keys() | job.limits.keys()))
    for name in sorted(names - ({"cpu"} if is_runtimes_cpu else set())):
        written, bound = job.requests.get(name, job.limits.get(name)), job.limits.get(name)
        amount, limit, is_device = parse(written), parse(bound), "/" in name
        is_odd = amount is not None and (is_device and (amount.denominator != 1 or amount != limit))
        is_tiny = amount is not None and not is_device and name != "cpu" and amount < MIB
        is_above = amount is not None and limit is not None and amount > limit
        yield from failures(
            job.manifest,
            Check(written is None, "requests-and-limits", f"no {name} is requested", f"requests and limits for {name}"),
            Check(
                is_odd or is_above,
                "resource-amount",
                f"{name}: {written} requested, limit {bound}; Kubernetes takes whole devices, within the limit",
                "the same whole number in both",
            ),
            Check(is_tiny, "resource-amount", f"{name}: {written} is a few bytes", "a unit like Mi or Gi"),
            Check(
                amount != limit and not is_above and not is_device and name in ("cpu", "memory"),
                "requests-and-limits",
                f"{name}: {written} requested, limit {bound}",
                "the same in both",
            ),
        )


def _memory(job: JobView, plan: Plan | None) -> Iterator[RuleFinding]:
    """Check the memory of a pod, and of its /dev/shm, against the plan."""
    needed = plan.shm_bytes_per_node if plan is not None else 0
    if plan is not None and plan.device == "cpu":
        needed += plan.peak_bytes_per_rank * plan.ranks_per_node + plan.beside_bytes
    limit, shm = parse(job.limits.get("memory")), job.shm
    size = parse(mapping(shm).get("sizeLimit"))
    several = job.count(GPU) > 1 and plan is None
    yield from failures(
        job.manifest,
        Check(
            limit is not None and needed > limit,
            "memory-limit",
            f"the limit is {float(limit or 0) / GIB:.1f} GiB, the plan needs {needed / GIB:.1f}",
            "a larger type, more nodes, or the settings that `aliquot plan` names",
        ),
        Check(shm is None and several, "shm", "several GPUs a pod, and /dev/shm is not mounted", _SHM_FIX, "warning"),
        Check(shm is not None and shm.get("medium") != "Memory", "shm", "/dev/shm is not in memory", "medium: Memory"),
        Check(
            size is not None and size < _SHM_DEFAULT_BYTES,
            "shm",
            f"/dev/shm has {float(size or 0) / MIB:.0f} MiB, less than the default of 64 MiB",
            _SHM_FIX,
        ),
        Check(
            size is not None and limit is not None and size >= limit,
            "shm-limit",
            f"/dev/shm of {float(size or 0) / GIB:.1f} GiB in a pod of {float(limit or 0) / GIB:.1f} GiB",
            "a smaller sizeLimit: the engine host needs none at all",
        ),
    )


def _image(job: JobView) -> Iterator[RuleFinding]:
    image, gpus = job.image.lower(), job.count(GPU)
    tag = re.search(r"[:@](.+)", image.rpartition("/")[2])
    yield from failures(
        job.manifest,
        Check(
            gpus == 0 and re.search(r"cuda|nvidia|-gpu\b", image),
            "image-kind",
            f"{job.image} without a GPU",
            "the image with CPU torch",
        ),
        Check(
            gpus > 0 and re.search(r"[-_:.]cpu\b", image),
            "image-kind",
            f"{job.image} on GPU nodes",
            "the image with CUDA",
        ),
        Check(
            image and (tag is None or tag[1] == "latest"),
            "image-tag",
            f"{job.image} has no fixed tag",
            "a tag that is pushed once, or a digest",
        ),
    )


def _lifetime(job: JobView, grace_s: float | None) -> Iterator[RuleFinding]:
    hook = mapping(dig(job.node, "lifecycle", "preStop"))
    sleeps = re.findall(r"\bsleep\W+(\d+)", str(hook.get("exec")))
    hook_s = dig(hook, "sleep", "seconds") or sum(map(int, sleeps))  # SIGTERM comes after the hook
    needed_s = (grace_s if grace_s is not None else 90.0) + GRACE_MARGIN_S + hook_s
    retried = any(spec.get("backoffLimit") for _, spec in job_specs(job.runtime)[:1])
    policy = job.runtime.get("spec", "podGroupPolicy") if job.runtime is not None else None
    yield from failures(
        job.manifest,
        # A job of another trainer may need less time, so check only if the runtime or the config of the job is known.
        Check(
            (job.runtime is not None or grace_s is not None) and job.grace_s < needed_s,
            "grace",
            f"terminationGracePeriodSeconds is {job.grace_s}",
            f"at least {needed_s:g}: checkpoint.grace_s + {GRACE_MARGIN_S}, and the seconds of a preStop hook",
        ),
        Check(
            job.manifest.get("spec", "suspend") is True and job.queue is None,
            "suspended",
            "spec.suspend is true",
            "suspend: false, or a queue of Kueue",
        ),
    )
    yield from failures(
        job.runtime,
        Check(
            job.runtime is not None
            and not retried
            and not job.runtime.get("spec", "template", "spec", "failurePolicy", "maxRestarts"),
            "restarts",
            "no failurePolicy.maxRestarts",
            "spec.template.spec.failurePolicy.maxRestarts",
        ),
        Check(
            policy and job.pod.get("schedulerName") in (None, "default-scheduler"),
            "gang-scheduling",
            f"podGroupPolicy is {', '.join(mapping(policy))}, and the pods have no schedulerName",
            "schedulerName in the pod template: volcano, or scheduler-plugins-scheduler",
        ),
    )


def _efa(job: JobView, plan: Plan | None) -> Iterator[RuleFinding]:
    efa = job.count(EFA) > 0
    uses_nccl = job.count(GPU) > 0 and job.nodes > 1 and (plan is None or plan.engine != "host")
    yield from failures(
        job.manifest,
        Check(
            uses_nccl and not efa,
            "efa-unused",
            "GPUs on several nodes without EFA",
            f"{EFA} in requests and limits, on types that have it (aliquot instances --efa --gpu)",
        ),
        Check(
            efa and "NCCL_NET" not in job.variables,
            "efa-unused",
            "without NCCL_NET, an image whose EFA plugin does not load trains over TCP without a message",
            "env NCCL_NET: AWS Libfabric",
        ),
    )


def _deadline(job: JobView, plan: Plan | None) -> Iterator[RuleFinding]:
    specs = [dig(spec, *path) for _, spec in job_specs(job.runtime) for path in ((), ("template", "spec"))]
    for spec in [job.manifest.get("spec"), *specs]:
        seconds = mapping(spec).get(_DEADLINE)
        takes = f"; the plan takes {plan.total_s:.0f} s" if plan is not None and plan.steps else ""
        yield from failures(
            job.manifest,
            Check(
                isinstance(seconds, int) and (plan is None or not plan.steps or seconds < plan.total_s),
                "deadline",
                f"{_DEADLINE} ends the job after {seconds} s{takes}",
                f"leave {_DEADLINE} out, or set it far above the duration of the run",
            ),
        )
