"""Run `aliquot cluster check`: apply all rules to manifests and, if known, to the run's config and plan.

An object must also match the schema of its kind, including CEL rules. If aliquot is installed without the extra
`cluster`, a finding says that objects are not checked against their schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec

from aliquot.cluster.capacity import check_admission
from aliquot.cluster.comparison import KEPT_RUNTIME_FIELDS, QUEUE_FIELDS, check_invariants, rendered_job
from aliquot.cluster.findings import Check, RuleFinding, did_you_mean, failures, finding, judge_fields
from aliquot.cluster.job import Job
from aliquot.cluster.job_view import job_views
from aliquot.cluster.kind_schemas import KindSchema, Violation, is_core, schemas_of_kind, supported
from aliquot.cluster.manifests import ManifestObject, select_kinds
from aliquot.cluster.node_fields import NODE_CLASS_FIELDS, POOL_FIELDS, check_node_class, check_pool
from aliquot.cluster.node_pool_view import pool_view
from aliquot.cluster.render import parsed
from aliquot.cluster.rules_config import check_config, check_mounted_config, survives_spot
from aliquot.cluster.rules_environment import check_environment, check_together
from aliquot.cluster.rules_job import RUNTIME_FIELDS, TRAIN_JOB_FIELDS, check_job
from aliquot.cluster.rules_references import check_pods_references
from aliquot.cluster.rules_security import check_secrets, check_security
from aliquot.cluster.storage_fields import check_storage

KUBERNETES = "1.34"  # version of the core kinds

_FIELDS = {
    "NodePool": POOL_FIELDS,
    "EC2NodeClass": NODE_CLASS_FIELDS,
    "TrainJob": TRAIN_JOB_FIELDS,
    **dict.fromkeys(("TrainingRuntime", "ClusterTrainingRuntime"), (*RUNTIME_FIELDS, *KEPT_RUNTIME_FIELDS)),
    **QUEUE_FIELDS,
}
_NEEDED = {"kubernetes_validate": "kubernetes-validate", "cel_expr_python": "cel-expr-python"}
_API_VERSION = re.compile(r"^([a-z0-9][-a-z0-9.]*/)?v[a-z0-9]+$")


def check_manifests(
    manifests: Sequence[ManifestObject], job: Job | None = None, crds: Sequence[KindSchema] = ()
) -> list[RuleFinding]:
    """Apply all rules and return the findings, errors first.

    Args:
        job: the job from which the manifests were rendered; by default, the job that the mounted config tells.
        crds: schemas to use in place of the schemas that aliquot ships for the same kinds.
    """
    given_kinds = {(schema.group, schema.kind) for schema in crds}
    known = [*crds, *(schema for schema in supported() if (schema.group, schema.kind) not in given_kinds)]
    pools = [pool_view(pool) for pool in select_kinds(manifests, "NodePool")]
    views = job_views(manifests)
    twins = [(view, job or rendered_job(view, manifests)) for view in views]
    groups: list[Iterable[RuleFinding]] = [
        _check_schemas(manifests, known),
        *(judge_fields(_FIELDS.get(item.kind, ()), item.get(), item) for item in manifests),
        *(check_pool(pool, any(twin is not None and survives_spot(twin) for _, twin in twins)) for pool in pools),
        *(check_node_class(node_class, pools) for node_class in select_kinds(manifests, "EC2NodeClass")),
        check_storage(views, manifests),
        check_pods_references(views, manifests),
        check_security(views, manifests),
        check_environment(views, pools, manifests),
        *(check_job(view, twin) for view, twin in twins),
        *(check_invariants(view, twin, manifests) for view, twin in twins),
        *(check_mounted_config(view, manifests) for view in views),
        *(check_together(view, pools, manifests) for view in views),
        *(check_admission(view, manifests) for view in views),
        check_secrets(views, manifests),
        *(check_config(twin) for _, twin in twins if twin is not None),
    ]
    return errors_first([item for group in groups for item in group])


def check_job_of_config(job: Job, crds: Sequence[KindSchema] = ()) -> list[RuleFinding]:
    """Check the manifests of `job` without writing them."""
    return check_manifests(parsed(job), job, crds)


def errors_first(findings: Sequence[RuleFinding]) -> list[RuleFinding]:
    """Return the findings without repetitions."""
    return sorted(dict.fromkeys(findings), key=lambda item: item.level != "error")


def _check_schemas(manifests: Sequence[ManifestObject], known: Sequence[KindSchema]) -> Iterator[RuleFinding]:
    """Check that all objects match their schemas.

    `known` may have several schemas of a kind, for different versions of an operator. The newest schema that knows all
    fields counts, because only the fields tell for which version an object was written.
    """
    missing = [name for module, name in _NEEDED.items() if find_spec(module) is None]
    yield from failures(
        "schemas",
        Check(
            missing,
            "not-judged",
            f"no object was checked against its schema: {' and '.join(missing)} are not installed",
            "pip install 'aliquot[cluster]'",
        ),
    )
    for manifest in manifests:
        api_version, kind = manifest.document.get("apiVersion"), manifest.document.get("kind")
        has_version = isinstance(api_version, str) and _API_VERSION.match(api_version)
        has_kind = isinstance(kind, str) and kind.isalnum()
        yield from failures(
            manifest,
            Check(not has_version, "malformed", f"apiVersion is {api_version!r}", "like v1 or karpenter.sh/v1"),
            Check(not has_kind, "malformed", f"kind is {kind!r}", "a word"),
        )
        if has_version and has_kind and not missing:
            yield from _judged(manifest, known)


def _judged(manifest: ManifestObject, known: Sequence[KindSchema]) -> Iterator[RuleFinding]:
    from aliquot.cluster.schemas import core_violations, violations

    candidates = schemas_of_kind(manifest.document, known)
    group = str(manifest.document["apiVersion"]).rpartition("/")[0]
    results = [(violations(manifest.document, schema), schema.source) for schema in candidates]
    violations_found, source = min(
        results,
        key=lambda result: sum(violation.rule == "unknown-field" for violation in result[0]),
        default=(list[Violation](), ""),
    )
    if not violations_found:
        # Of a custom object, kubernetes-validate can check only the metadata: pass them as those of a ConfigMap.
        metadata_alone = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest.document.get("metadata")}
        core = core_violations(manifest.document if is_core(group) else metadata_alone, KUBERNETES)
        if core is None or not (candidates or is_core(group)):
            yield from _unknown(manifest, known)
        violations_found, source = core or [], f"Kubernetes {KUBERNETES}"
    yield from (
        finding(violation.rule, manifest, f"{violation.message} ({source})", violation.fix)
        for violation in violations_found
    )


def _unknown(manifest: ManifestObject, known: Sequence[KindSchema]) -> Iterator[RuleFinding]:
    """Report an object of an unknown kind: as an error if its API group is known, else as not checked."""
    api_version = str(manifest.document["apiVersion"])
    group = api_version.rpartition("/")[0]
    kinds = sorted({f"{schema.api_version} {schema.kind}" for schema in known if schema.group == group})
    if not kinds and not is_core(group):
        groups = {schema.group for schema in known}
        yield finding(
            "not-read",
            manifest,
            f"{manifest.kind} of {api_version}",
            did_you_mean(group, groups, "--crds DIR with its CRD, or --live", similarity=0.8),
        )
        return
    yield finding(
        "unknown-kind",
        manifest,
        f"{api_version} has no {manifest.kind}",
        did_you_mean(f"{api_version} {manifest.kind}", kinds, "see `kubectl api-resources`"),
    )
