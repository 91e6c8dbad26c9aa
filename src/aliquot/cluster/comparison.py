"""Compare a job with its rendered twin: render again from the config that the pods mount, and explain differences.

`render` stores the cluster section and the plan beside the config, so that the same manifests can be rendered again. A
difference is a finding only if it breaks what a run needs: signals reach Python, names resolve, exit codes have their
meaning, the config fits the pods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any

from aliquot.cluster.capacity import shown
from aliquot.cluster.findings import Check, Field, RuleFinding, failures, finding, judge_fields, none_of, one_of
from aliquot.cluster.job import EFA, GPU, Job, describe
from aliquot.cluster.job_view import SHM, JobView, job_specs, job_views
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, mappings, select_kinds
from aliquot.cluster.pod import CONFIG_FILE, EXPECTED_FILE, NODE, RENDERED_FILE, uses_hub
from aliquot.cluster.quantity import parse
from aliquot.cluster.render import parsed
from aliquot.cluster.rules_references import references
from aliquot.config.cluster_section import ClusterSection
from aliquot.config.read_config import read_text
from aliquot.core.decode import decode_json
from aliquot.core.errors import UserError
from aliquot.planner.plan import Plan

_SHELLS = r"(?:.*/)?(?:sh|bash|dash|ash|zsh)"
_LAST_EXEC = re.compile(r"(?:^|[;&\n])\s*exec\s[^|;&\n]+\s*$")  # the shell becomes the program
_HOST_DNS = "ClusterFirstWithHostNet"
_TTL = "the log and the state of a failed job are gone, and Trainer 2.3 starts a failed job anew: {path} is {value}"
KEPT_RUNTIME_FIELDS = (
    Field("spec/template/spec/network/enableDNSHostnames", "name-resolution", none_of(False), "leave it out"),
    Field("spec/template/spec/network/subdomain", "name-resolution", one_of(None), "leave it out: Trainer names rank 0"
          " by the subdomain that JobSet chooses"),
    Field("spec/template/spec/ttlSecondsAfterFinished", "ended-job", one_of(None), "leave it out", _TTL),
    Field("spec/template/spec/replicatedJobs/*/template/spec/ttlSecondsAfterFinished", "ended-job", one_of(None),
          "leave it out", _TTL),
)  # fmt: skip
_POD = (
    Field(
        "",
        "name-resolution",
        lambda pod: not dig(pod, "hostNetwork") or dig(pod, "dnsPolicy") == _HOST_DNS,
        "leave hostNetwork out: pods use EFA without it",
        f"hostNetwork without dnsPolicy {_HOST_DNS}: the pods ask the DNS of their node, which does not know rank 0",
    ),
    Field("dnsPolicy", "name-resolution", none_of("Default"), "dnsPolicy: ClusterFirst"),
    Field("subdomain", "name-resolution", one_of(None), "leave it out: JobSet sets the subdomain"),
    Field("hostname", "name-resolution", one_of(None), "leave it out: JobSet sets the host name"),
)
_ADMITS = Field(
    "spec/stopPolicy", "queue", one_of(None, "None"), "stopPolicy: None", "{path} is {value}: the queue admits no job"
)
QUEUE_FIELDS = {
    "LocalQueue": (_ADMITS,),
    "ClusterQueue": (
        _ADMITS,
        Field(
            "spec/namespaceSelector",
            "queue",
            none_of(None),
            "namespaceSelector: {}",
            "{path} is {value}: no namespace may use the queue",
        ),
    ),
}


# The resources of which a pod may have less than rendered only at a cost: the rule that says so, and the part that is
# enough. Other daemonsets than planned may leave a pod fewer CPUs.
_AMOUNTS = {
    "memory": ("memory-limit", Fraction(0)),
    "cpu": ("threads", Fraction(3, 4)),
    GPU: ("gpu-unused", Fraction(1)),
    EFA: ("fabric", Fraction(1)),
}
_FREE_VARIABLES = "NCCL_(DEBUG.*|SOCKET_IFNAME|NET)|FI_PROVIDER|PYTHON.*"  # checked elsewhere, or a matter of taste
# Fields of objects beside the job that decide which nodes, networks and file systems the pods get.
_RENDERED_FIELDS = {
    "EC2NodeClass": ("role", "subnetSelectorTerms", "securityGroupSelectorTerms"),
    "NodePool": ("template/spec/requirements",),
    "PersistentVolume": ("csi",),
}
_NAMED_KINDS = ("ServiceAccount", "PriorityClass", "LocalQueue")


# Environment variables with values that break a run: names, the condition, rule and fix.
_VARIABLES: tuple[tuple[str, Callable[[str, JobView, Job | None], object], str, str], ...] = (
    (
        "(NCCL|GLOO|TP)_SOCKET_IFNAME",
        lambda value, view, job: not value.startswith("^")
        and not any("eth0".startswith(name.lstrip("=")) for name in value.split(",")),
        "fabric", "leave it out, or ^lo,docker: a pod's interface is eth0, whatever its node calls its own",
    ),
    (
        "(CUDA|NVIDIA)_VISIBLE_DEVICES",
        lambda value, view, job: value not in ("all", "", ",".join(map(str, range(view.count(GPU))))),
        "gpu-unused", "leave it out: the device plugin of NVIDIA selects the GPUs of a pod",
    ),
    (
        "(HF_HUB|TRANSFORMERS|HF_DATASETS)_OFFLINE",
        lambda value, view, job: value.lower() not in ("0", "", "false", "no", "off")
        and job is not None and uses_hub(job),
        "reference", "leave it out, or give paths on the shared file system: the config names something of the hub",
    ),
    (
        "NCCL_(P2P|SHM)_DISABLE",
        lambda value, view, job: value not in ("0", "") and view.count(GPU) > 1,
        "fabric", "leave it out: with it, GPUs of a node exchange through the network",
    ),
    *(
        (
            name,
            lambda value, view, job, best=best: view.count(EFA) and value != best,
            "efa-unused",
            f"env {name}: {best}; with others, NCCL uses TCP",
        )
        for name, best in (("FI_PROVIDER", "efa"), ("NCCL_NET", "AWS Libfabric"))
    ),
)  # fmt: skip


def rendered_job(view: JobView, manifests: Sequence[ManifestObject]) -> Job | None:
    """Return the job from which the manifests of `view` were rendered; None if they are not aliquot's."""
    mounted = {dig(volume, "configMap", "name") for volume in view.volumes.values()}
    for config_map in select_kinds(manifests, "ConfigMap"):
        texts = mapping(config_map.get("data"))
        if config_map.name not in mounted or RENDERED_FILE not in texts:
            continue
        with suppress(UserError, ValueError, KeyError, TypeError, ArithmeticError):  # edited by hand
            rendered = decode_json(str(texts[RENDERED_FILE]))
            config, _ = read_text(str(texts[CONFIG_FILE]), CONFIG_FILE, [])
            section = ClusterSection.model_validate(rendered["cluster"])
            job = describe(config.model_copy(update={"cluster": section}), Plan.from_json(rendered["plan"]))
            return replace(job, is_proof=EXPECTED_FILE in texts)
    return None


def check_invariants(view: JobView, job: Job | None, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Check a job against what every run needs, and against its rendered twin if `job` is known."""
    yield from judge_fields(_POD, view.pod, view.manifest)
    yield from _signals(view)
    yield from failures(
        view.manifest,
        *(
            Check(re.fullmatch(names, name) and breaks(value, view, job), rule, f"env {name} is {value!r}", fix)
            for name, value in view.variables.items()
            for names, breaks, rule, fix in _VARIABLES
        ),
    )
    if job is not None:
        rendered = parsed(job)
        (twin,) = job_views(rendered)
        for compare in (_failures, _amounts, _volumes, _environment):
            yield from compare(view, twin)
        yield from _absent(view, twin, rendered, manifests)
        yield from failures(
            view.runtime,
            Check(
                job.section.is_elastic and view.runtime is not None and view.runtime.get("spec", "podGroupPolicy"),
                "failure-rules",
                f"cluster.nodes is {job.section.nodes}, and podGroupPolicy waits for all {view.nodes} nodes",
                "no podGroupPolicy, or a fixed number of nodes",
            ),
        )


def _signals(view: JobView) -> Iterator[RuleFinding]:
    shell, option, script = (*view.command, "", "", "")[:3]
    is_shell = re.fullmatch(_SHELLS, shell) and re.fullmatch("-[a-z]*c", option)
    return failures(view.manifest, Check(
        is_shell and not _LAST_EXEC.search(script), "signals",
        f"the command is `{shell} {option} ...`: the shell keeps SIGTERM and the exit code to itself",
        "the command without a shell, or `exec aliquot train ...` without a pipe: the kubelet keeps the log",
    ))  # fmt: skip


# The ways in which a pod can end: description, exit code (None: no exit code), and the condition DisruptionTarget.
_ENDS = (
    ("is told to stop", 143, False),
    ("is drained or reclaimed", 143, True),
    ("is lost with its node", None, True),
    ("ends for bad input", 2, False),
    ("crashes", 1, False),
)


def reaction(runtime: ManifestObject | None, code: int | None, disrupted: bool) -> str:
    """Return what Kubernetes and JobSet do about the end of a pod."""
    spec = next((spec for name, spec in job_specs(runtime) if name == NODE), {})
    for rule in map(mapping, listed(dig(spec, "podFailurePolicy", "rules"))):
        exits = mapping(rule.get("onExitCodes"))
        is_listed = (code in listed(exits.get("values"))) == (exits.get("operator") == "In")
        is_code_meant = exits and code is not None and exits.get("containerName") in (None, NODE) and is_listed
        conditions = map(mapping, listed(rule.get("onPodConditions")))
        is_condition_meant = disrupted and any(condition.get("type") == "DisruptionTarget" for condition in conditions)
        if is_code_meant or is_condition_meant:
            cause = f"exit code {code} " if is_code_meant else "condition DisruptionTarget "
            return (
                str(rule.get("action"))
                if rule.get("action") != "FailJob"
                else _job_set_reaction(runtime, "PodFailurePolicy", cause)
            )
    return "Count" if spec.get("backoffLimit") else _job_set_reaction(runtime, "BackoffLimitExceeded", "")


def _job_set_reaction(runtime: ManifestObject | None, reason: str, cause: str) -> str:
    rules = runtime.items("spec", "template", "spec", "failurePolicy", "rules") if runtime is not None else []
    for rule in rules:
        reasons, patterns = (listed(rule.get(f"onJobFailure{key}")) for key in ("Reasons", "MessagePatterns"))
        is_meant = any(re.search(re.escape(str(pattern)), cause) for pattern in patterns)
        if (not reasons or reason in reasons) and (not patterns or is_meant):
            return str(rule.get("action"))
    return "RestartJobSet"


def _failures(view: JobView, twin: JobView) -> Iterator[RuleFinding]:
    specs = [next((spec for name, spec in job_specs(item.runtime) if name == NODE), {}) for item in (view, twin)]
    rows = [("successPolicy", *(dig(spec, "successPolicy") for spec in specs))]
    rows += [
        (f"if a pod {event}, the reaction", *(reaction(item.runtime, code, disrupted) for item in (view, twin)))
        for event, code, disrupted in _ENDS
    ]
    differing = [(what, actual, rendered) for what, actual, rendered in rows if actual != rendered]
    return (
        finding(
            "failure-rules",
            view.runtime,
            f"{what} is {actual}; aliquot renders {rendered}",
            "podFailurePolicy, successPolicy and failurePolicy as `render` writes them: the first rule that matches"
            " counts",
        )
        for what, actual, rendered in differing[:1]
        if view.runtime is not None
    )


def _amounts(view: JobView, twin: JobView) -> Iterator[RuleFinding]:
    """Check that a pod has the devices, the disk and the CPUs of the plan. `memory-limit` checks the memory."""
    for name, amount in twin.requested.items():
        rule, enough = _AMOUNTS.get(name, ("resource-amount", 1))
        actual = view.requested.get(name, Fraction(0))
        yield from failures(
            view.manifest,
            Check(
                actual < amount * enough,
                rule,
                f"{shown(name, actual)} requested; aliquot renders {shown(name, amount)}",
                "the rendered amount, or render again for other nodes",
            ),
        )


def _volumes(view: JobView, twin: JobView) -> Iterator[RuleFinding]:
    """Check that the trainer has its own volumes, writable and as large as rendered."""
    for path in (str(mount["mountPath"]) for mount in mappings(twin.node, "volumeMounts")):
        (mount, volume), (_, planned) = (job.mount(path) or ({}, {}) for job in (view, twin))
        actual, rendered = (mapping(item.get("emptyDir")) for item in (volume, planned))
        size, least = (parse(item.get("sizeLimit")) or Fraction(0) for item in (actual, rendered))
        is_own = mount.get("mountPath") == path and not mount.get("readOnly")
        is_as_rendered = actual.get("medium") == rendered.get("medium") and (size or least) >= least
        volume_text = f"emptyDir {actual}" if is_own else "no volume that the trainer can write to"
        yield from failures(
            view.manifest,
            Check(
                rendered and not (is_own and is_as_rendered),  # `check_mounted_config` checks claims and the config
                "shm" if path == SHM else "scratch",
                f"{path} has {volume_text}; aliquot renders emptyDir {rendered}",
                f"the rendered volume, and its volumeMount at {path}",
            ),
        )


def _environment(view: JobView, twin: JobView) -> Iterator[RuleFinding]:
    """Check the variables that tell the trainer its directories, its network and its keys."""
    written = {item.get("name"): item.get("valueFrom") or item.get("value") for item in view.env}
    for item in twin.env:
        name, rendered = item["name"], item.get("valueFrom") or item.get("value")
        yield from failures(
            view.manifest,
            Check(
                written.get(name) != rendered and not re.fullmatch(_FREE_VARIABLES, name),
                "environment",
                f"env {name} is {written.get(name, 'missing')}; aliquot renders {rendered}",
                "the rendered variable, or change the run's config",
            ),
        )


def _absent(
    view: JobView, twin: JobView, rendered: Sequence[ManifestObject], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    """Report what is rendered or named by the config, but is neither among the manifests nor named by the pods."""
    present = {(item.kind, item.name) for item in manifests}
    yield from failures(
        view.manifest,
        *(
            Check(
                (item.kind, item.name) not in present,
                "not-applied",
                f"{item.kind}/{item.name} is rendered for this job, and not among the manifests",
                "its file, also in kustomization.yaml",
            )
            for item in select_kinds(rendered, "NodePool", "NetworkPolicy", "Job")
        ),
    )
    for item in select_kinds(rendered, *_RENDERED_FIELDS):
        for edited in (other for other in select_kinds(manifests, item.kind) if other.name == item.name):
            for path in _RENDERED_FIELDS[item.kind]:
                actual, planned = (dig(manifest.get("spec"), *path.split("/")) for manifest in (edited, item))
                yield from failures(
                    edited,
                    Check(
                        actual != planned,
                        "rendered-field",
                        f"spec/{path} has {_difference(actual, planned)}; rendered: {_difference(planned, actual)}",
                        "the rendered value, or change the section `cluster` of the config and render again",
                    ),
                )
    names = dict.fromkeys(references(view))
    for kind, name in references(twin):
        others = [other for other_kind, other in names if other_kind == kind]
        yield from failures(
            view.manifest,
            Check(
                (kind, name) not in present | names.keys() and kind in ("PersistentVolumeClaim", *_NAMED_KINDS),
                "reference",
                f"the config names {kind}/{name}, and the pods {', '.join(others) or 'none'}",
                f"{name}, or change the run's config",
                "warning",
            ),
        )


def _difference(value: Any, other: Any) -> Any:
    """Return the parts of a value, a list or a mapping, that `other` does not have."""
    if isinstance(value, dict) and isinstance(other, dict):
        return {key: _difference(item, other.get(key)) for key, item in value.items() if item != other.get(key)}
    if isinstance(value, list) and isinstance(other, list):
        return [item for item in value if item not in other]
    return value
