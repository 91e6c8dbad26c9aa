"""Rules about a TrainJob and its runtime, also compared with the plan, and for elastic jobs (launch.nodes MIN:MAX)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.cluster.findings import Check, RuleFinding, did_you_mean, failures, finding
from aliquot.cluster.job import EFA, GPU
from aliquot.cluster.job_view import NODE, JobView, configs_of, job_specs, patched_jobs, pod_spec
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, mappings
from aliquot.cluster.pod import ANCESTOR
from aliquot.cluster.quantity import GIB, MIB, parse, parse_bytes, parse_millicores
from aliquot.config.cluster_section import max_job_name_length
from aliquot.core.number_format import count_of
from aliquot.planner.plan import Plan

RESERVED_ENV = frozenset({"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"})

_SHM_DEFAULT_BYTES = 64 * MIB
_GRACE_MARGIN_S = 30

_CONTAINERS = ("template", "spec", "template", "spec", "containers")
_EFA_VARIABLES = {"FI_PROVIDER": "efa", "NCCL_NET": "AWS Libfabric"}  # with others, NCCL uses TCP
_DEADLINE = "activeDeadlineSeconds"
_RANGE = re.compile(r"\d+:\d+")
_STOPPED = 143
# The ways in which a pod can end: description, exit code (None: the pod is lost without an exit code), and whether the
# pod has the condition DisruptionTarget.
_POD_ENDS = (
    ("is drained or reclaimed", _STOPPED, True),
    ("is told to stop", _STOPPED, False),
    ("is lost with its node", None, True),
)


def check_job(job: JobView, trainer: str | None, plan: Plan | None, grace_s: float | None) -> Iterator[RuleFinding]:
    """Check a TrainJob. All arguments but the job are None if unknown.

    Args:
        trainer: the version of Kubeflow Trainer, such as "2.3".
        plan: the plan of the run.
        grace_s: `checkpoint.grace_s` of the run's config.
    """
    name, most = job.manifest.name, max_job_name_length(job.nodes)
    if len(name) > most:
        message = f"{len(name)} letters, and with {job.nodes} nodes it may have {most}"
        yield finding("name-too-long", job.manifest, message, "a shorter metadata.name")
    yield from _trainer(job, trainer)
    yield from _processes(job, plan)
    yield from _resources(job, plan)
    yield from _shm(job, plan)
    yield from _lifetime(job, grace_s)
    yield from _efa(job, plan)
    yield from _restarting(job)
    yield from _gang(job)
    yield from _ending(job, plan)


def _trainer(job: JobView, trainer: str | None) -> Iterator[RuleFinding]:
    spec = mapping(job.manifest.get("spec"))
    if "trainer" not in spec:
        yield finding("no-trainer", job.manifest, "spec.trainer is missing", "spec.trainer with numNodes and command")
    both = "podTemplateOverrides" in spec and "runtimePatches" in spec
    for field, versions in (("podTemplateOverrides", ("2.0", "2.1")), ("runtimePatches", ("2.2", "2.3"))):
        if field in spec and (both or (trainer is not None and trainer not in versions)):
            message = f"spec.{field}" + (f" with Trainer {trainer}" if trainer else "")
            fix = "one of the two: cluster.trainer of a config, or the version that is installed"
            yield finding("trainer-dialect", job.manifest, message, fix)
    if job.runtime is None:
        reference = mapping(spec.get("runtimeRef"))
        runtime = f"{reference.get('kind', 'ClusterTrainingRuntime')}/{reference.get('name')}"
        message = f"runtimeRef names {runtime}, which is not among the manifests"
        fix = did_you_mean(runtime, job.other_runtimes, "check its manifest, too", similarity=0.0)
        yield finding("runtime", job.manifest, message, fix, "error" if job.other_runtimes else None)
    else:
        yield from _runtime(job, job.runtime)
    for container in (item for patch in job.pod_specs[1:] for item in mappings(patch, "containers")):
        name = container.get("name")
        yield from failures(
            job.manifest,
            Check(name != NODE, "container-name", f"patches a container {name!r}", f"name it {NODE!r}"),
            Check(
                name == NODE and container.get("env"),
                "node-env",
                "a patch has env for the container `node`",
                "spec.trainer.env",
            ),
        )
    for variable in job.env:
        if variable.get("name") in RESERVED_ENV:
            yield finding("reserved-env", job.manifest, f"env has {variable['name']}", "leave it to the controller")


def _runtime(job: JobView, runtime: ManifestObject) -> Iterator[RuleFinding]:
    """Check what the controller and the webhooks of Trainer ask of a runtime beyond its schema.

    Source: kubeflow/trainer, pkg/runtime/core/trainingruntime.go and pkg/webhooks/trainingruntime_webhook.go.
    """
    policy = mapping(runtime.get("spec", "mlPolicy"))
    replicated = runtime.items("spec", "template", "spec", "replicatedJobs")
    trainers = [item for item in replicated if dig(item, "template", "metadata", "labels", ANCESTOR) == "trainer"]
    yield from failures(
        runtime,
        Check(
            not policy.keys() - {"numNodes"},
            "no-trainer",
            "spec.mlPolicy names no framework",
            "mlPolicy: {torch: {}}",
        ),
        Check(
            not trainers,
            "container-name",
            "no replicated job has the label of the trainer",
            f"{ANCESTOR}: trainer in its template.metadata.labels",
        ),
    )
    for item in trainers:
        names = [mapping(container).get("name") for container in listed(dig(item, *_CONTAINERS))]
        replicas = item.get("replicas", 1)
        yield from failures(
            runtime,
            Check(NODE not in names, "container-name", f"the trainer has the containers {names}", f"name one {NODE!r}"),
            Check(
                replicas != 1,
                "container-name",
                f"the trainer has {replicas} replicas; the nodes of a job are spec.trainer.numNodes",
                "replicas: 1",
            ),
        )
    known = [item.get("name") for item in replicated]
    for name in patched_jobs(job.manifest):
        if name not in known:
            fix = did_you_mean(name, map(str, known), "the name of a replicated job of the runtime", similarity=0.0)
            yield finding("container-name", job.manifest, f"patches {name!r}, which the runtime does not have", fix)


def _processes(job: JobView, plan: Plan | None) -> Iterator[RuleFinding]:
    processes, millicores, gpus = job.processes, job.cpu_millicores, job.count(GPU)
    if job.nodes < 1:
        yield finding("processes", job.manifest, f"numNodes is {job.nodes}: the job has no pod", "numNodes: 1 or more")
    if not isinstance(processes, int) or isinstance(processes, bool):
        # Without numProcPerNode, Trainer 2.3 starts one process per GPU, or per requested CPU without GPUs. Trainer 2.1
        # starts one per CPU.
        if processes is None and (millicores or 0) <= 1000 and gpus == 0:
            return  # the default is one process
        shown = "not set" if processes is None else repr(processes)
        yield finding("processes", job.manifest, f"numProcPerNode is {shown}", "numProcPerNode: an integer")
        return
    if gpus and processes > gpus:
        message = f"{processes} processes on {count_of(gpus, 'GPU')}"
        yield finding("processes", job.manifest, message, "numProcPerNode: one process for each GPU")
    cpus = f"{(millicores or 0) / 1000:g} CPUs"
    threads = 1 if plan is None else plan.threads_per_rank
    fix, threads_each = "one process for many CPUs", ""
    if plan is not None:
        fix, threads_each = "fewer processes, launch.threads_per_rank, or a larger type", f" x {threads} threads"
        if processes != plan.ranks_per_node or job.nodes != plan.nodes:
            message = f"{job.nodes} nodes x {processes} processes; the plan has {plan.nodes} x {plan.ranks_per_node}"
            yield finding("processes", job.manifest, message, "render again, or plan for these")
    if millicores is not None and processes * threads * 1000 > millicores:
        yield finding("threads", job.manifest, f"{processes} processes{threads_each} on {cpus}", fix)


def _resources(job: JobView, plan: Plan | None) -> Iterator[RuleFinding]:
    for name, read in (("cpu", parse_millicores), ("memory", parse_bytes)):
        request, limit = job.requests.get(name), job.limits.get(name)
        if name == "cpu" and job.processes is None and request == "1":
            continue  # aliquot's runtimes request one CPU, so that Trainer starts one process per node
        if request is None and limit is None:
            fix = f"requests and limits for {name}"
            yield finding("requests-and-limits", job.manifest, f"no {name} is requested", fix)
        elif request is not None and read(request) != read(limit):
            is_above = limit is not None and (read(request) or 0) > (read(limit) or 0)
            rule = "resource-amount" if is_above else "requests-and-limits"
            yield finding(rule, job.manifest, f"{name}: {request} requested, limit {limit}", "the same in both")
    yield from _amounts(job)
    limit_bytes = job.memory_limit_bytes
    if plan is not None and plan.device == "cpu" and limit_bytes is not None:
        needed = plan.peak_bytes_per_rank * plan.ranks_per_node + plan.beside_bytes + plan.shm_bytes_per_node
        if needed > limit_bytes:
            message = f"the limit is {limit_bytes / GIB:.1f} GiB, the plan needs {needed / GIB:.1f} ({plan.peak.name})"
            fix = "a larger type, more nodes, or the settings that `aliquot plan` names"
            yield finding("memory-limit", job.manifest, message, fix)
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


def _amounts(job: JobView) -> Iterator[RuleFinding]:
    """Check what Kubernetes asks of devices (`domain/name`), and amounts of bytes whose unit was forgotten."""
    for name in sorted(map(str, job.requests.keys() | job.limits.keys())):
        request, limit = job.requests.get(name, job.limits.get(name)), job.limits.get(name)
        amount = parse(request)
        if amount is None:
            continue
        is_device = "/" in name
        yield from failures(
            job.manifest,
            Check(
                is_device and (amount.denominator != 1 or amount != parse(limit)),
                "resource-amount",
                f"{name}: {request} requested, limit {limit}; Kubernetes takes whole numbers that are equal",
                "the same whole number in both",
            ),
            Check(
                not is_device and name != "cpu" and amount < MIB,
                "resource-amount",
                f"{name}: {request} is {float(amount):g} bytes",
                "a unit like Mi or Gi",
            ),
        )


def _shm(job: JobView, plan: Plan | None) -> Iterator[RuleFinding]:
    needed = plan.shm_bytes_per_node if plan is not None else 0
    volume, limit = job.shm, job.memory_limit_bytes
    fix = "an emptyDir {medium: Memory, sizeLimit: ...} at /dev/shm"
    if volume is None:
        several = job.count(GPU) > 1 and plan is None
        yield from failures(
            job.manifest,
            Check(needed > _SHM_DEFAULT_BYTES, "shm", f"the plan needs {needed / GIB:.2f} GiB of /dev/shm", fix),
            Check(several, "shm", "several GPUs a pod, and /dev/shm is not mounted", fix, "warning"),
        )
        return
    size = parse_bytes(volume.get("sizeLimit"))
    if volume.get("medium") != "Memory":
        yield finding("shm", job.manifest, "/dev/shm is not in memory", "medium: Memory")
    if size is not None and size < needed:
        yield finding("shm", job.manifest, f"/dev/shm has {size / GIB:.2f} GiB, the plan needs {needed / GIB:.2f}", fix)
    if size is not None and limit is not None and size >= limit:
        message = f"/dev/shm of {size / GIB:.1f} GiB in a pod of {limit / GIB:.1f} GiB"
        yield finding("shm-limit", job.manifest, message, "a smaller sizeLimit: the engine host needs none at all")


def _lifetime(job: JobView, grace_s: float | None) -> Iterator[RuleFinding]:
    needed_s = (grace_s if grace_s is not None else 90.0) + _GRACE_MARGIN_S
    # A job of another trainer may need less time, so check only if the runtime or the config of the job is known.
    known = job.runtime is not None or grace_s is not None
    if known and job.grace_s < needed_s:
        fix = f"at least {needed_s:g}: checkpoint.grace_s + {_GRACE_MARGIN_S}"
        yield finding("grace", job.manifest, f"terminationGracePeriodSeconds is {job.grace_s}", fix)
    if job.runtime is not None:
        retried = any(spec.get("backoffLimit") for _, spec in job_specs(job.runtime)[:1])
        if not retried and not job.runtime.get("spec", "template", "spec", "failurePolicy", "maxRestarts"):
            fix = "spec.template.spec.failurePolicy.maxRestarts"
            yield finding("restarts", job.runtime, "no failurePolicy.maxRestarts", fix)


def _efa(job: JobView, plan: Plan | None) -> Iterator[RuleFinding]:
    efa, gpus = job.count(EFA) > 0, job.count(GPU) > 0
    uses_nccl = plan is None or plan.engine != "host"
    if not efa and gpus and job.nodes > 1 and uses_nccl:
        fix = f"{EFA} in requests and limits, on types that have it (aliquot instances --efa --gpu)"
        yield finding("efa-unused", job.manifest, "GPUs on several nodes without EFA", fix)
    variables = {variable.get("name"): variable.get("value") for variable in job.env}
    for name, value in _EFA_VARIABLES.items() if efa else ():
        message = f"env {name} is {variables.get(name)!r}, and the pods ask for EFA"
        if name == "NCCL_NET" and name not in variables:
            message = "without NCCL_NET, an image whose EFA plugin does not load trains over TCP without a message"
        elif variables.get(name, value) == value:
            continue
        yield finding("efa-unused", job.manifest, message, f"env {name}: {value}")


def _ending(job: JobView, plan: Plan | None) -> Iterator[RuleFinding]:
    """Report what ends or delays a job independently of its training."""
    if job.manifest.get("spec", "suspend") is True and job.queue is None:
        yield finding("suspended", job.manifest, "spec.suspend is true", "suspend: false, or a queue of Kueue")
    specs = [dig(spec, *path) for _, spec in job_specs(job.runtime) for path in ((), ("template", "spec"))]
    for spec in [job.manifest.get("spec"), *specs]:
        seconds = mapping(spec).get(_DEADLINE)
        if isinstance(seconds, int) and (plan is None or seconds < plan.total_s):
            takes = "" if plan is None else f"; the plan takes {plan.total_s:.0f} s"
            fix = f"leave {_DEADLINE} out, or set it far above the duration of the run"
            yield finding("deadline", job.manifest, f"{_DEADLINE} ends the job after {seconds} s{takes}", fix)


def _restarting(job: JobView) -> Iterator[RuleFinding]:
    for _, spec in job_specs(job.runtime):
        written = dig(spec, "template", "spec", "restartPolicy")
        policy = written or "OnFailure"  # the default that JobSet's webhook sets
        if policy == "Always" or (policy != "Never" and spec.get("podFailurePolicy") is not None):
            suffix = "" if policy == "Always" else " beside podFailurePolicy"
            message = f"restartPolicy is {written or 'not set, so OnFailure'}{suffix}"
            yield finding("restart-policy", job.runtime, message, "restartPolicy: Never")


def _gang(job: JobView) -> Iterator[RuleFinding]:
    policy = job.runtime.get("spec", "podGroupPolicy") if job.runtime is not None else None
    if policy and pod_spec(job).get("schedulerName") in (None, "default-scheduler"):
        message = f"podGroupPolicy is {', '.join(policy)}, and the pods have no schedulerName"
        fix = "schedulerName in the pod template: volcano, or scheduler-plugins-scheduler"
        yield finding("gang-scheduling", job.runtime, message, fix)


def check_elastic(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    if job.runtime is None or (nodes := _node_range(job, manifests)) is None:
        return
    if job.runtime.get("spec", "podGroupPolicy"):
        message = f"launch.nodes is {nodes}, and podGroupPolicy waits for all {job.nodes} nodes"
        yield finding("nodes-that-go", job.runtime, message, "no podGroupPolicy, or a fixed number of nodes")
    spec = next((spec for name, spec in job_specs(job.runtime) if name == NODE), {})
    for event, code, disrupted in _POD_ENDS:
        action = _failure_action(mapping(spec.get("podFailurePolicy")), code, disrupted)
        if action != "Ignore":
            what = "counts against backoffLimit" if action in ("Count", None) else f"ends the Job ({action})"
            fix = "podFailurePolicy: first Ignore for DisruptionTarget, then for exit code 143, as `render` writes it"
            yield finding("nodes-that-go", job.runtime, f"launch.nodes is {nodes}, and a pod that {event} {what}", fix)
            return
    yield from failures(
        job.runtime,
        Check(
            spec.get("backoffLimit") == 0,
            "nodes-that-go",
            f"launch.nodes is {nodes}, and the first pod that fails ends the Job",
            "a backoffLimit above 0: restarts a node x nodes",
        ),
        Check(
            spec.get("successPolicy") is None,
            "nodes-that-go",
            f"launch.nodes is {nodes}, and the Job is over only when each of its pods has succeeded, one that finds no"
            " node, too",
            "successPolicy: {rules: [{succeededCount: 1}]}",
            "warning",
        ),
    )


def _node_range(job: JobView, manifests: Sequence[ManifestObject]) -> str | None:
    """Return `launch.nodes` of an elastic job as MIN:MAX, from the command or from a config that the pods mount.

    Returns None if the number of nodes is fixed or unknown.
    """
    for word in reversed(job.command):
        if word.startswith("launch.nodes="):
            return _range(word.partition("=")[2])
    ranges = (_range(dig(config, "launch", "nodes")) for config in configs_of(job, manifests))
    return next((nodes for nodes in ranges if nodes is not None), None)


def _range(value: object) -> str | None:
    return value if isinstance(value, str) and _RANGE.fullmatch(value) else None


def _failure_action(policy: dict[str, Any], code: int | None, disrupted: bool) -> object:
    """Return the action of the first rule in a podFailurePolicy that matches the end of a pod, or None."""
    for rule in listed(policy.get("rules")):
        exits, conditions = mapping(mapping(rule).get("onExitCodes")), listed(mapping(rule).get("onPodConditions"))
        if disrupted and any(mapping(condition).get("type") == "DisruptionTarget" for condition in conditions):
            return rule.get("action")
        matches = (code in listed(exits.get("values"))) == (exits.get("operator") == "In")
        if exits and code is not None and exits.get("containerName") in (None, NODE) and matches:
            return rule.get("action")
    return None
