"""Run `cluster check --live`: check manifests against a cluster and its AWS account.

Nothing is changed: all queries read, and objects are applied as a server-side dry run. kubectl uses its current context
and credentials. A refused query becomes a finding that names the verb and the resource.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aliquot.cluster.aws_account import ask_account
from aliquot.cluster.capacity import check_quota
from aliquot.cluster.findings import Check, RuleFinding, failures, finding
from aliquot.cluster.job import Job
from aliquot.cluster.job_view import job_views
from aliquot.cluster.kind_schemas import KindSchema, schemas_of
from aliquot.cluster.manifests import ManifestObject, dig, listed, mapping, to_yaml
from aliquot.cluster.rules_references import references
from aliquot.core.errors import ClusterError, MissingToolError

_TIMEOUT_S = 60
_OPERATORS = {
    "karpenter.sh": ("Karpenter", "docs/tutorials/eks.md, Install Karpenter"),
    "karpenter.k8s.aws": ("Karpenter's AWS provider", "docs/tutorials/eks.md, Install Karpenter"),
    "trainer.kubeflow.org": ("Kubeflow Trainer", "docs/tutorials/eks.md, Install Kubeflow Trainer"),
    "scheduling.x-k8s.io": ("the coscheduling plugin", "docs/guides/eks-jobs.md, Start all nodes or none"),
    "scheduling.volcano.sh": ("Volcano", "docs/guides/eks-jobs.md, Start all nodes or none"),
}
_POD_GROUPS = {"coscheduling": "scheduling.x-k8s.io", "volcano": "scheduling.volcano.sh"}  # podGroupPolicy -> API group
# The objects that a job names, by kind: rule, resource for kubectl, and fix.
_NAMED_OBJECTS = {
    "LocalQueue": ("queue", "localqueues.kueue.x-k8s.io", "kubectl apply -f QUEUES"),
    "PriorityClass": ("priority-class", "priorityclass", "kubectl create priorityclass {name} --value=1000"),
    "ServiceAccount": ("service-account", "serviceaccount", "kubectl create serviceaccount {name} -n {namespace}"),
}
_FORBIDDEN = re.compile(r'cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)"(?: in API group "(?P<group>[^"]*)")?')

Version = tuple[int, int]

# Compatible versions of Kubeflow Trainer, JobSet and Kueue: Trainer's manifests contain the JobSet that Trainer was
# built with (2.1.0 has 0.10.1, 2.3.0 has 0.12.0). Kueue up to 0.16 supports podTemplateOverrides; Kueue since 0.17
# supports runtimePatches and only Trainer 2.2 and later (kubernetes-sigs/kueue issues 11931 and 14722). The dry run
# finds what an installed version does not know.
# The ends of the operators' image names, by which `operator_versions` recognises the operators:
_IMAGES = {
    "trainer": "trainer-controller-manager", "jobset": "jobset", "kueue": "kueue",
}  # fmt: skip
_RUNTIME_PATCHES: Version = (2, 2)  # the first version of Trainer that supports runtimePatches
_JOBSET_OF_TRAINER: dict[Version, Version] = {(2, 1): (0, 10), (2, 3): (0, 12)}


# How kubectl's last line begins if no API server answered, or if kubectl has no credentials for the server.
_NO_ANSWER = (
    "The connection to the server", "Unable to connect to the server", "error: You must be logged in",
    "error: current-context", "error: no configuration",
)  # fmt: skip


class Refused(Exception):
    """kubectl failed; the message is the error output of kubectl."""

    command = "kubectl"  # the command, without its options

    @property
    def last_line(self) -> str:
        return str(self).splitlines()[-1]

    @property
    def is_absent(self) -> bool:
        """Whether the object or its kind does not exist."""
        return "NotFound" in str(self) or "doesn't have a resource type" in str(self)


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl, with kubectl's current context and credentials."""

    program: str = "kubectl"

    def run(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl with `text` as standard input, and return the standard output.

        Raises Refused, or ClusterError if no cluster answers.
        """
        try:
            result = subprocess.run(
                [self.program, *arguments, f"--request-timeout={_TIMEOUT_S}s"],
                input=text, capture_output=True, text=True, timeout=2 * _TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Refused("the cluster does not answer") from None
        if result.returncode != 0:
            refused = Refused(result.stderr.strip() or f"exit code {result.returncode}")
            refused.command = " ".join(["kubectl", *arguments[:2]])
            if refused.last_line.startswith(_NO_ANSWER):
                raise ClusterError(
                    f"no cluster answers kubectl: {refused.last_line}. Choose one with"
                    " `aws eks update-kubeconfig --name CLUSTER`"
                )
            raise refused
        return result.stdout

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        loaded = json.loads(self.run("get", *arguments, "-o", "json"))
        return listed(loaded["items"]) if "items" in loaded else [loaded]


def ask_cluster(manifests: Sequence[ManifestObject], job: Job | None) -> list[RuleFinding]:
    """Run all checks that ask the cluster and AWS. Raises UserError if kubectl is not installed."""
    kubectl = kubectl_here()
    findings: list[RuleFinding] = []
    for check in (_operators, _secrets, _quotas, _named_objects, _dry_run):
        try:
            findings += check(kubectl, manifests)
        except Refused as refused:
            findings.append(_permission(refused))
    return [*findings, *ask_account(manifests, job.section if job else None)]


def kubectl_here() -> Kubectl:
    """Return the installed kubectl. Raises UserError if kubectl is not installed."""
    if shutil.which("kubectl") is None:
        raise MissingToolError("kubectl is needed, configured for the cluster (aws eks update-kubeconfig)")
    return Kubectl()


def crds_of_cluster() -> list[KindSchema]:
    """Read the CRDs of the cluster; return none if the query is refused, because `ask_cluster` reports the refusal."""
    try:
        return list(schemas_of(kubectl_here().get("customresourcedefinitions"), "the cluster"))
    except Refused:
        return []


def _operators(kubectl: Kubectl, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    groups = {str(dig(item, "spec", "group")) for item in kubectl.get("customresourcedefinitions")}
    needed = {str(item.document.get("apiVersion")).partition("/")[0] for item in manifests}
    policies = (mapping(item.get("spec", "podGroupPolicy")) for item in manifests)
    needed |= {_POD_GROUPS[name] for policy in policies for name in policy if name in _POD_GROUPS}
    yield from (
        finding("operator", group, f"{name} is not installed", f"install it: {where}")
        for group, (name, where) in _OPERATORS.items()
        if group in needed - groups
    )
    yield from check_versions(operator_versions(kubectl.get("deployments", "--all-namespaces")), manifests)


def _secrets(kubectl: Kubectl, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    rendered = {(manifest.namespace, manifest.name) for manifest in manifests if manifest.kind == "Secret"}
    for view in job_views(manifests):
        space = view.manifest.namespace
        for variable in view.env:
            reference = mapping(dig(variable, "valueFrom", "secretKeyRef"))
            name, key = reference.get("name"), reference.get("key")
            if not isinstance(name, str) or (space, name) in rendered:
                continue
            try:
                # The template prints only the names of the Secret's keys, so that no secret leaves the cluster.
                template = "-o", "go-template={{range $key, $value := .data}}{{$key}}\n{{end}}"
                keys = kubectl.run("get", "secret", str(name), "-n", space, *template).split()
                problem = f"has no key {key!r}"
            except Refused as refused:
                if not refused.is_absent:
                    raise
                keys, problem = [], "does not exist"
            fix = f"kubectl create secret generic {name} -n {space} --from-file={key}=FILE"
            yield from failures(
                view.manifest, Check(key not in keys, "secret", f"Secret {space}/{name} {problem}", fix)
            )


def _named_objects(kubectl: Kubectl, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Check that the LocalQueue with its ClusterQueue, the PriorityClass and the service account of a job exist."""
    rendered = {(manifest.kind, manifest.name) for manifest in manifests}
    for view in job_views(manifests):
        job = view.manifest
        for kind, name in references(view):
            if kind not in _NAMED_OBJECTS or (kind, name) in rendered:
                continue
            rule, resource, fix = _NAMED_OBJECTS[kind]
            try:
                (item,) = kubectl.get(resource, name, "-n", job.namespace)
                if kind == "LocalQueue":
                    kubectl.get("clusterqueues.kueue.x-k8s.io", str(dig(item, "spec", "clusterQueue")))
            except Refused as refused:
                fix = fix.format(name=name, namespace=job.namespace)
                yield finding(rule, job, refused.last_line, fix) if refused.is_absent else _permission(refused)


def _quotas(kubectl: Kubectl, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    for view in job_views(manifests):
        for quota in kubectl.get("resourcequotas", "-n", view.manifest.namespace):
            name, status = dig(quota, "metadata", "name"), mapping(quota.get("status"))
            yield from check_quota(view, name, mapping(status.get("hard")), mapping(status.get("used")))


def _dry_run(kubectl: Kubectl, manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Apply every object as a server-side dry run; separately, so that a finding names the refused object."""
    new_namespaces = {manifest.name for manifest in manifests if manifest.kind == "Namespace"}
    runtimes = any(manifest.kind in ("TrainingRuntime", "ClusterTrainingRuntime") for manifest in manifests)
    for manifest in manifests:
        try:
            apply = ["apply", "--server-side", "--dry-run=server", "--field-manager=aliquot", "-f", "-"]
            kubectl.run(*apply, text=to_yaml(manifest.document))
        except Refused as refused:
            reason, space = str(refused), manifest.namespace
            # A dry run creates no namespace and no runtime, so objects that need one of these cannot be checked.
            no_namespace = space in new_namespaces and f'namespaces "{space}" not found' in reason
            no_runtime = runtimes and "must be created before the TrainJob" in reason
            if _FORBIDDEN.search(reason):
                yield _permission(refused)
            elif not (no_namespace or no_runtime):
                yield finding("refused-by-server", manifest, refused.last_line, "correct what it names")


def _permission(refused: Refused) -> RuleFinding:
    """Make a finding that names the verb and the resource that the cluster refused."""
    match = _FORBIDDEN.search(str(refused))
    if match is None:
        return finding("permission", "the cluster", refused.last_line, f"{refused.command} by hand")
    verb, name = match["verb"], ".".join(filter(None, match.group("resource", "group")))
    return finding("permission", name, f"{verb} {name} was refused", f"a role that allows {verb} on {name}")


def operator_versions(deployments: Sequence[dict[str, Any]]) -> dict[str, Version]:
    """Read the versions of the operators from the image tags of the cluster's Deployments."""
    versions: dict[str, Version] = {}
    for deployment in deployments:
        for container in listed(dig(deployment, "spec", "template", "spec", "containers")):
            image = str(container.get("image")).partition("@")[0]
            tag = re.search(r":v?(\d+)\.(\d+)[^/:]*$", image)
            for name, part in _IMAGES.items():
                if tag is not None and f"/{image[: tag.start()]}".endswith(f"/{part}"):
                    versions.setdefault(name, (int(tag[1]), int(tag[2])))
    return versions


def check_versions(installed: Mapping[str, Version], manifests: Sequence[ManifestObject]) -> Iterator[RuleFinding]:
    """Check that the installed versions of operators, by name, suit the manifests and each other."""
    trainer, jobset, kueue = (installed.get(name) for name in _IMAGES)
    needed = None if trainer is None else _JOBSET_OF_TRAINER.get(trainer)
    if trainer is not None and needed is not None and jobset is not None and jobset < needed:
        yield finding(
            "versions",
            "JobSet",
            f"{_dotted(jobset)} with Kubeflow Trainer {_dotted(trainer)}",
            f"JobSet {_dotted(needed)} or later; Trainer's own manifests bring it",
        )
    queued = any(view.queue is not None for view in job_views(manifests))
    if queued and trainer is not None and kueue is not None:
        new_trainer, new_kueue = trainer >= _RUNTIME_PATCHES, kueue >= (0, 17)
        if new_trainer != new_kueue:
            yield finding(
                "versions",
                "Kueue",
                f"{_dotted(kueue)} with Kubeflow Trainer {_dotted(trainer)}",
                "Kueue 0.17 or later" if new_trainer else "Kueue 0.16, or Kubeflow Trainer 2.3",
            )


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
