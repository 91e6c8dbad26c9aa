"""Rules about security: no passwords in manifests, and pods that pass `restricted`, the strictest Pod Security profile.

Source of the profile: kubernetes.io/docs/concepts/security/pod-security-standards, for Kubernetes 1.34 and Linux.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.cluster.findings import RuleFinding, finding
from aliquot.cluster.job_view import JobView, pod_spec
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, mappings, select_kinds
from aliquot.core.errors import has_url_credentials

_ENFORCE = "pod-security.kubernetes.io/enforce"
_CONTAINERS = ("initContainers", "containers", "ephemeralContainers")
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem", "net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem",
}  # fmt: skip
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_TOKEN_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)(_|$)", re.IGNORECASE)
_TOKEN_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,})\b")
_SECCOMP_TYPES = ("RuntimeDefault", "Localhost")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def check_secrets(jobs: Sequence[JobView], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Report tokens in environment variables, and URLs with passwords in ConfigMaps.

    The URL of `checkpoint.mirror` in a run's config may contain a password, for example.
    """
    for job in jobs:
        for variable in job.env:
            name, value = str(variable.get("name")), variable.get("value")
            if isinstance(value, str) and value and (_TOKEN_VALUE.search(value) or _TOKEN_NAME.search(name)):
                fix = "valueFrom: {secretKeyRef: {name: ..., key: ...}}"
                yield finding("secret-value", job.manifest, f"env {name} has its value in the manifest", fix)
    for config_map in select_kinds(manifests, "ConfigMap"):
        for name, text in mapping(config_map.get("data")).items():
            if has_url_credentials(str(text)):
                message = f"data {name} has a URL with a user name or password in it"
                fix = "the URL without them, and valueFrom: {secretKeyRef: {name: ..., key: ...}} in the pods' env"
                yield finding("secret-value", config_map, message, fix)


def check_security(jobs: Sequence[JobView], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Check the pods against the Pod Security profile `restricted`.

    A violation is an error if a Namespace in the manifests enforces the profile, else a warning.
    """
    enforcing = {
        item.name
        for item in select_kinds(manifests, "Namespace")
        if item.get("metadata", "labels", _ENFORCE) == "restricted"
    }
    pods = [(job.manifest, pod_spec(job)) for job in jobs if job.runtime is not None]
    # Check the pods of Kubernetes Jobs only in a namespace that enforces the profile.
    pods += [
        (item, mapping(item.get("spec", "template", "spec")))
        for item in select_kinds(manifests, "Job")
        if item.namespace in enforcing
    ]
    for manifest, pod in pods:
        if violations := list(restricted_violations(pod)):
            message = f"its pods are not `restricted`: {'; '.join(violations)}"
            fix = "the securityContext that `render` writes; run what needs root before the profile is enforced"
            yield finding("pod-security", manifest, message, fix, "error" if manifest.namespace in enforcing else None)


def restricted_violations(pod: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of a pod spec that the profile `restricted` forbids."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    for volume in map(mapping, listed(pod.get("volumes"))):
        if kinds := sorted(str(key) for key in volume if key != "name" and key not in _VOLUMES):
            yield f"volume {volume.get('name')} is {', '.join(kinds)}"
    pod_context = mapping(pod.get("securityContext"))
    for sysctl in map(mapping, listed(pod_context.get("sysctls"))):
        if sysctl.get("name") not in _SYSCTLS:
            yield f"sysctl {sysctl.get('name')}"
    yield from _options(pod_context)
    for container in (container for key in _CONTAINERS for container in mappings(pod, key)):
        for violation in _container_violations(container, pod_context):
            yield f"container {container.get('name')}: {violation}"


def _container_violations(container: dict[str, Any], pod_context: dict[str, Any]) -> Iterator[str]:
    context = mapping(container.get("securityContext"))
    merged = {**pod_context, **context}  # the container's settings override the pod's
    added = [name for name in listed(dig(context, "capabilities", "add")) if name != "NET_BIND_SERVICE"]
    handlers = [container.get(probe) for probe in _PROBES]
    handlers += [dig(container, "lifecycle", hook) for hook in ("postStart", "preStop")]
    hosts = (dig(handler, kind, "host") for handler in handlers for kind in ("httpGet", "tcpSocket"))
    is_violated = {
        "allowPrivilegeEscalation is not false": context.get("allowPrivilegeEscalation") is not False,
        "privileged": context.get("privileged"),
        "runAsNonRoot is not true": merged.get("runAsNonRoot") is not True,
        "runAsUser is 0": merged.get("runAsUser") == 0,
        "seccompProfile is not RuntimeDefault": dig(merged, "seccompProfile", "type") not in _SECCOMP_TYPES,
        "capabilities do not drop ALL": "ALL" not in listed(dig(context, "capabilities", "drop")),
        f"capabilities add {', '.join(map(str, added))}": added,
        f"procMount is {context.get('procMount')}": context.get("procMount") not in (None, "Default"),
        "a hostPort": any(mapping(port).get("hostPort") for port in listed(container.get("ports"))),
        "a probe or hook names a host": any(hosts),
    }
    yield from (violation for violation, violated in is_violated.items() if violated)
    yield from _options(context)


def _options(context: dict[str, Any]) -> Iterator[str]:
    """Yield the forbidden settings of a securityContext that both pods and containers can have."""
    selinux = mapping(context.get("seLinuxOptions"))
    if (selinux.get("type") or "") not in _SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions"
    for profile in ("seccompProfile", "appArmorProfile"):
        if dig(context, profile, "type") == "Unconfined":
            yield f"{profile} is Unconfined"
    if dig(context, "windowsOptions", "hostProcess"):
        yield "windowsOptions.hostProcess"
