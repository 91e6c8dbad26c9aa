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
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from aliquot.cluster.capacity import shown
from aliquot.cluster.fields import Field, judge_fields, none_of, one_of
from aliquot.cluster.findings import Check, Level, RuleFinding, did_you_mean, failures, finding
from aliquot.cluster.job import EFA, GPU, Job, describe
from aliquot.cluster.job_view import NODE, SHM, JobView, job_specs, job_views
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, mappings, select_kinds
from aliquot.cluster.pod import CONFIG_FILE, EXPECTED_FILE, RENDERED_FILE, uses_hub
from aliquot.cluster.quantity import parse
from aliquot.cluster.render import parsed
from aliquot.cluster.rules_references import references
from aliquot.config.cluster_section import ClusterSection
from aliquot.config.read_config import read_text
from aliquot.config.schema import RunConfig
from aliquot.core.decode import decode_json
from aliquot.core.errors import DeepspeedConfigError, UserError
from aliquot.planner.plan import Plan

_SUFFIXES = (".yaml", ".yml")
_LOST_WITH_THE_POD = ("emptyDir", "ephemeral")
_SHELLS = r"(?:.*/)?(?:sh|bash|dash|ash|zsh)"
_LAST_EXEC = re.compile(r"(?:^|[;&\n])\s*exec\s[^|;&\n]+\s*$")  # the shell becomes the program
_HOST_DNS = "ClusterFirstWithHostNet"
_TTL = "the log and the state of a failed job are gone, and Trainer 2.3 starts a failed job anew: {path} is {value}"
_RUNTIME = (
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
_QUEUES = {
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
_NAMED_KINDS = ("ServiceAccount", "PriorityClass", "LocalQueue")
# The keys of a config on which memory and processes depend, and those on which only the duration depends.
_PLANNED = (
    r"(model|shard|adapter)\..*|launch\.(device|ranks|nodes|threads_per_rank)|data\.(sequence_length|packing)"
    r"|train\.(objective|.*batch.*|gradient.*|precision|fp8|optimizer_states|compile|freeze)"
)
_TIMED = r"train\.(max_steps|num_train_epochs|eval_steps)|checkpoint\.every"


class _Variable(NamedTuple):
    """An environment variable with a value that breaks a run."""

    names: str  # regular expression
    breaks: Callable[[str, JobView, Job | None], object]
    rule: str
    fix: str


_VARIABLES = (
    _Variable(
        "(NCCL|GLOO|TP)_SOCKET_IFNAME",
        lambda value, view, job: not value.startswith("^")
        and not any("eth0".startswith(name.lstrip("=")) for name in value.split(",")),
        "fabric", "leave it out, or ^lo,docker: a pod's interface is eth0, whatever its node calls its own",
    ),
    _Variable(
        "(CUDA|NVIDIA)_VISIBLE_DEVICES",
        lambda value, view, job: value not in ("all", "", ",".join(map(str, range(view.count(GPU))))),
        "gpu-unused", "leave it out: the device plugin of NVIDIA selects the GPUs of a pod",
    ),
    _Variable(
        "(HF_HUB|TRANSFORMERS|HF_DATASETS)_OFFLINE",
        lambda value, view, job: value.lower() not in ("0", "", "false", "no", "off")
        and job is not None and uses_hub(job),
        "reference", "leave it out, or give paths on the shared file system: the config names something of the hub",
    ),
    _Variable(
        "NCCL_(P2P|SHM)_DISABLE",
        lambda value, view, job: value not in ("0", "") and view.count(GPU) > 1,
        "fabric", "leave it out: with it, GPUs of a node exchange through the network",
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
    if view.runtime is not None:
        yield from judge_fields(_RUNTIME, view.runtime.get(), view.runtime)
    for kind, fields in _QUEUES.items():
        for queue in select_kinds(manifests, kind):
            yield from judge_fields(fields, queue.get(), queue)
    yield from _signals(view)
    for name, value in view.variables.items():
        for variable in _VARIABLES:
            if re.fullmatch(variable.names, name) and variable.breaks(value, view, job):
                yield finding(variable.rule, view.manifest, f"env {name} is {value!r}", variable.fix)
    if job is not None:
        rendered = parsed(job)
        (twin,) = job_views(rendered)
        for compare in (_failures, _amounts, _volumes, _environment):
            yield from compare(view, twin)
        yield from _absent(view, twin, rendered, manifests)
        if job.section.is_elastic and view.runtime is not None and view.runtime.get("spec", "podGroupPolicy"):
            message = f"cluster.nodes is {job.section.nodes}, and podGroupPolicy waits for all {view.nodes} nodes"
            yield finding("failure-rules", view.runtime, message, "no podGroupPolicy, or a fixed number of nodes")


def _signals(view: JobView) -> Iterator[RuleFinding]:
    words = view.command
    if len(words) < 3 or not re.fullmatch(_SHELLS, words[0]) or not re.fullmatch("-[a-z]*c", words[1]):
        return
    if _LAST_EXEC.search(words[2]) is None:
        message = f"the command is `{words[0]} {words[1]} ...`: the shell keeps SIGTERM and the exit code to itself"
        yield finding(
            "signals", view.manifest, message,
            "the command without a shell, or `exec aliquot train ...` without a pipe: the kubelet keeps the log",
        )  # fmt: skip


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
    if view.runtime is None:
        return
    fix = (
        "podFailurePolicy, successPolicy and failurePolicy as `render` writes them: the first rule that matches counts"
    )
    specs = [next((spec for name, spec in job_specs(item.runtime) if name == NODE), {}) for item in (view, twin)]
    actual, rendered = (dig(spec, "successPolicy") for spec in specs)
    if actual != rendered:
        message = f"successPolicy is {actual}; aliquot renders {rendered}"
        yield finding("failure-rules", view.runtime, message, fix)
    for event, code, disrupted in _ENDS:
        actual, rendered = (reaction(item.runtime, code, disrupted) for item in (view, twin))
        if actual != rendered:
            message = f"if a pod {event}, the reaction is {actual}; aliquot renders {rendered}"
            yield finding("failure-rules", view.runtime, message, fix)
            return


def _amounts(view: JobView, twin: JobView) -> Iterator[RuleFinding]:
    """Check that a pod has the devices, the disk and the CPUs of the plan. `memory-limit` checks the memory."""
    for name, amount in twin.requested.items():
        rule, enough = _AMOUNTS.get(name, ("resource-amount", 1))
        actual = view.requested.get(name, Fraction(0))
        if actual < amount * enough:
            message = f"{shown(name, actual)} requested; aliquot renders {shown(name, amount)}"
            yield finding(rule, view.manifest, message, "the rendered amount, or render again for other nodes")


def _volumes(view: JobView, twin: JobView) -> Iterator[RuleFinding]:
    """Check that the trainer has its own volumes, writable and as large as rendered."""
    for path in (str(mount["mountPath"]) for mount in mappings(twin.node, "volumeMounts")):
        (mount, volume), (_, planned) = (job.mount(path) or ({}, {}) for job in (view, twin))
        actual, rendered = (mapping(item.get("emptyDir")) for item in (volume, planned))
        size, least = (parse(item.get("sizeLimit")) or Fraction(0) for item in (actual, rendered))
        is_own = mount.get("mountPath") == path and not mount.get("readOnly")
        is_as_rendered = actual.get("medium") == rendered.get("medium") and (size or least) >= least
        if rendered and not (is_own and is_as_rendered):  # `check_mounted_config` checks claims and the config
            found = f"emptyDir {actual}" if is_own else "no volume that the trainer can write to"
            rule = "shm" if path == SHM else "scratch"
            message = f"{path} is {found}; aliquot renders emptyDir {rendered}"
            yield finding(rule, view.manifest, message, f"the rendered volume, and its volumeMount at {path}")


def _environment(view: JobView, twin: JobView) -> Iterator[RuleFinding]:
    """Check the variables that tell the trainer its directories, its network and its keys."""
    written = {item.get("name"): item.get("valueFrom") or item.get("value") for item in view.env}
    for item in twin.env:
        name, rendered = item["name"], item.get("valueFrom") or item.get("value")
        if written.get(name) != rendered and not re.fullmatch(_FREE_VARIABLES, name):
            message = f"env {name} is {written.get(name, 'missing')}; aliquot renders {rendered}"
            yield finding("environment", view.manifest, message, "the rendered variable, or change the run's config")


def _absent(
    view: JobView, twin: JobView, rendered: Sequence[ManifestObject], manifests: Sequence[ManifestObject]
) -> Iterator[RuleFinding]:
    """Report what is rendered or named by the config, but is neither among the manifests nor named by the pods."""
    present = {(item.kind, item.name) for item in manifests}
    for item in select_kinds(rendered, "NodePool", "NetworkPolicy", "Job"):
        if (item.kind, item.name) not in present:
            message = f"{item.kind}/{item.name} is rendered for this job, and not among the manifests"
            yield finding("not-applied", view.manifest, message, "its file, also in kustomization.yaml")
    names = dict.fromkeys(references(view))
    for kind, name in references(twin):
        if (kind, name) not in present | names.keys() and kind in ("PersistentVolumeClaim", *_NAMED_KINDS):
            others = [other for other_kind, other in names if other_kind == kind]
            message = f"the config names {kind}/{name}, and the pods {', '.join(others) or 'none'}"
            yield finding("reference", view.manifest, message, f"{name}, or change the run's config", "warning")


def check_mounted_config(job: JobView, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    words = job.command
    path = next((word for word in words if word.startswith("/") and word.endswith(_SUFFIXES)), None)
    if job.runtime is None or path is None or not any("aliquot" in word for word in words):
        return
    mounted = job.mount(path)
    if mounted is None:
        message = f"the command reads {path}, and no volume is mounted there"
        yield finding("config-file", job.manifest, message, "a volumeMount of the ConfigMap", "warning")
        return
    mount, volume = mounted
    name = dig(volume, "configMap", "name")
    config_map = next((item for item in select_kinds(manifests, "ConfigMap") if item.name == name), None)
    if config_map is None:
        message = f"ConfigMap/{name} with {path} is not among the manifests: nothing is compared with config and plan"
        yield finding("config-file", job.manifest, message, "check its file, too", "warning")
        return
    key = _key(mount, volume, path)
    texts = mapping(config_map.get("data"))
    if key not in texts:
        message = f"the command reads {path}, and {config_map.kind}/{name} has {', '.join(texts) or 'no data'}"
        yield finding("config-file", job.manifest, message, did_you_mean(key, texts, "a key of the ConfigMap"))
        return
    try:
        config, _ = read_text(str(texts[key]), key, [word for word in words[words.index(path) + 1 :] if "=" in word])
    except DeepspeedConfigError:  # its JSON may be on the shared file system
        return
    except UserError as error:
        yield finding("config-file", config_map, str(error), "correct the config, and render again")
        return
    yield from _directories(job, config)
    yield from _planned_config(config_map, config)


def _planned_config(config_map: ManifestObject, config: RunConfig) -> Iterator[RuleFinding]:
    """Compare the mounted config with the planned one, in the keys on which memory, time and processes depend."""
    changed: dict[str, str] = {}
    with suppress(UserError, ValueError, KeyError, TypeError):  # not rendered, or edited by hand
        planned = RunConfig.model_validate(decode_json(str(config_map.get("data")[RENDERED_FILE]))["config"])
        before, now = (item.model_dump(mode="json", by_alias=True) for item in (planned, config))
        for section, key in ((name, key) for name in now for key in mapping(now[name]) | mapping(before[name])):
            value, former = dig(now, section, key), dig(before, section, key)
            if value not in ("auto", former) and re.fullmatch(f"{_PLANNED}|{_TIMED}", f"{section}.{key}"):
                changed[f"{section}.{key}"] = f"{section}.{key} is {value}, and was planned as {former}"
    if changed:
        level: Level = "error" if any(re.fullmatch(_PLANNED, key) for key in changed) else "warning"
        fix = "change the run's config, and render again"
        yield finding("planned-config", config_map, "; ".join(changed.values()), fix, level)


def _key(mount: dict[str, Any], volume: dict[str, Any], path: str) -> str:
    """Return the key of the ConfigMap that appears at `path` in the container."""
    below = mount.get("subPath") or str(PurePosixPath(path).relative_to(str(mount.get("mountPath"))))
    items = [mapping(item) for item in listed(dig(volume, "configMap", "items"))]
    return next((str(item.get("key")) for item in items if item.get("path") == below), str(below))


def _directories(job: JobView, config: RunConfig) -> Iterator[RuleFinding]:
    """Check that results and cache are on a volume that outlives the pods and that the pods may write."""
    directories = {"run.directory": config.run.directory, "data.cache_directory": config.data.cache_directory}
    for key, path in directories.items():
        if path is None or not path.is_absolute():
            continue
        mount, volume = job.mount(path.as_posix()) or ({}, {})
        wrong = {
            "no volume is mounted there": not mount,
            "its volume is lost with its pod": any(kind in volume for kind in _LOST_WITH_THE_POD),
            "it is mounted read-only": mount.get("readOnly") or dig(volume, "persistentVolumeClaim", "readOnly"),
        }
        fix = "a volumeMount of the shared claim, without readOnly"
        checks = (
            Check(is_wrong, "not-shared", f"{key} is {path}: {reason}", fix) for reason, is_wrong in wrong.items()
        )
        yield from failures(job.manifest, *checks)
