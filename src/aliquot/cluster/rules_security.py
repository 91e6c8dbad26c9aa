"""Rules about security: no passwords in manifests, and pods that pass `restricted`, the strictest Pod Security profile.

Source of the profile: kubernetes.io/docs/concepts/security/pod-security-standards, for Kubernetes 1.34 and Linux.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from aliquot.cluster.findings import Check, Field, RuleFinding, failures, finding, holds, judge_fields, none_of, one_of
from aliquot.cluster.job_view import JobView
from aliquot.cluster.manifests import ManifestObject, dig, mapping, mappings, select_kinds
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


def _options(path: str) -> tuple[Field, ...]:
    """Return the settings of a securityContext that both pods and containers can have."""
    return (
        Field(f"{path}/seLinuxOptions", _RULE, lambda value: (dig(value, "type") or "") in _SELINUX_TYPES
              and not dig(value, "user") and not dig(value, "role"), "", "seLinuxOptions"),
        *(Field(f"{path}/{profile}/type", _RULE, none_of("Unconfined"), "", f"{profile} is Unconfined")
          for profile in ("seccompProfile", "appArmorProfile")),
        Field(f"{path}/windowsOptions/hostProcess", _RULE, none_of(True), "", "windowsOptions.hostProcess"),
    )  # fmt: skip


def _has_no_host(container: Any) -> bool:
    hooks = [dig(container, "lifecycle", hook) for hook in ("postStart", "preStop")]
    handlers = [*hooks, *(dig(container, f"{probe}Probe") for probe in ("liveness", "readiness", "startup"))]
    return not any(dig(handler, kind, "host") for handler in handlers for kind in ("httpGet", "tcpSocket"))


_RULE = "pod-security"
_POD = (
    *(Field(name, _RULE, none_of(True), "", name) for name in ("hostNetwork", "hostPID", "hostIPC")),
    Field("volumes/*", _RULE, lambda volume: mapping(volume).keys() <= {"name", *_VOLUMES}, "", "{path} is {value}"),
    Field("securityContext/sysctls/*/name", _RULE, one_of(*_SYSCTLS), "", "sysctl {value}"),
    *_options("securityContext"),
)
_CONTAINER = (
    Field("securityContext/allowPrivilegeEscalation", _RULE, one_of(False), "",
          "allowPrivilegeEscalation is not false"),
    Field("securityContext/privileged", _RULE, none_of(True), "", "privileged"),
    Field("effective/runAsNonRoot", _RULE, one_of(True), "", "runAsNonRoot is not true"),
    Field("effective/runAsUser", _RULE, none_of(0), "", "runAsUser is 0"),
    Field("effective/seccompProfile/type", _RULE, one_of("RuntimeDefault", "Localhost"), "",
          "seccompProfile is not RuntimeDefault"),
    Field("securityContext/capabilities/drop", _RULE, holds("ALL"), "", "capabilities do not drop ALL"),
    Field("securityContext/capabilities/add/*", _RULE, one_of("NET_BIND_SERVICE"), "", "capabilities add {value}"),
    Field("securityContext/procMount", _RULE, one_of(None, "Default"), "", "procMount is {value}"),
    Field("ports/*/hostPort", _RULE, lambda port: not port, "", "a hostPort"),
    Field("", _RULE, _has_no_host, "", "a probe or hook names a host"),
    *_options("securityContext"),
)  # fmt: skip


def check_secrets(jobs: Sequence[JobView], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Report tokens in environment variables, and URLs with passwords in ConfigMaps.

    The URL of `checkpoint.mirror` in a run's config may contain a password, for example.
    """
    for job in jobs:
        for variable in job.env:
            name, value = str(variable.get("name")), variable.get("value")
            yield from failures(
                job.manifest,
                Check(
                    isinstance(value, str) and value and (_TOKEN_VALUE.search(value) or _TOKEN_NAME.search(name)),
                    "secret-value",
                    f"env {name} has its value in the manifest",
                    "valueFrom: {secretKeyRef: {name: ..., key: ...}}",
                ),
            )
    for config_map in select_kinds(manifests, "ConfigMap"):
        yield from failures(
            config_map,
            *(
                Check(
                    has_url_credentials(str(text)),
                    "secret-value",
                    f"data {name} has a URL with a user name or password in it",
                    "the URL without them, and valueFrom: {secretKeyRef: {name: ..., key: ...}} in the pods' env",
                )
                for name, text in mapping(config_map.get("data")).items()
            ),
        )


def check_security(jobs: Sequence[JobView], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Check the pods against the Pod Security profile `restricted`.

    A violation is an error if a Namespace in the manifests enforces the profile, else a warning.
    """
    enforcing = {
        item.name
        for item in select_kinds(manifests, "Namespace")
        if item.get("metadata", "labels", _ENFORCE) == "restricted"
    }
    pods = [(job.manifest, job.pod) for job in jobs if job.runtime is not None]
    # Check the pods of Kubernetes Jobs only in a namespace that enforces the profile.
    pods += [
        (item, mapping(item.get("spec", "template", "spec")))
        for item in select_kinds(manifests, "Job")
        if item.namespace in enforcing
    ]
    for manifest, pod in pods:
        if violations := list(restricted_violations(pod)):
            yield finding(
                "pod-security",
                manifest,
                f"its pods are not `restricted`: {'; '.join(violations)}",
                "the securityContext that `render` writes; run what needs root before the profile is enforced",
                "error" if manifest.namespace in enforcing else None,
            )


def restricted_violations(pod: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of a pod spec that the profile `restricted` forbids."""
    yield from _messages(_POD, pod)
    context = mapping(pod.get("securityContext"))
    for container in (container for key in _CONTAINERS for container in mappings(pod, key)):
        settings = mapping(container.get("securityContext"))
        # The container's settings override the pod's.
        view = container | {"securityContext": settings, "effective": {**context, **settings}}
        yield from (f"container {container.get('name')}: {message}" for message in _messages(_CONTAINER, view))


def _messages(fields: Sequence[Field], document: dict[str, Any]) -> Iterator[str]:
    yield from (violation.message for violation in judge_fields(fields, document, ""))
