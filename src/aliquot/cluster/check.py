"""Run `aliquot cluster check`: apply all rules to manifests and, if known, to the run's config and plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from aliquot.cluster.findings import RuleFinding
from aliquot.cluster.job import Job
from aliquot.cluster.job_view import JobView, configs_of, job_views
from aliquot.cluster.kind_schemas import KindSchema, supported
from aliquot.cluster.manifests import ManifestObject, dig, select_kinds
from aliquot.cluster.node_pool_view import pool_view
from aliquot.cluster.render import parsed
from aliquot.cluster.rules_config import check_config
from aliquot.cluster.rules_environment import check_environment, check_hugepages
from aliquot.cluster.rules_job import check_elastic, check_job
from aliquot.cluster.rules_mounted_config import check_mounted_config
from aliquot.cluster.rules_nodes import check_node_class, check_pool, check_references
from aliquot.cluster.rules_references import check_pods_references
from aliquot.cluster.rules_scheduling import check_together
from aliquot.cluster.rules_schemas import check_schemas
from aliquot.cluster.rules_security import check_secrets, check_security
from aliquot.cluster.rules_volumes import check_storage


def check_manifests(
    manifests: Sequence[ManifestObject], job: Job | None = None, crds: Sequence[KindSchema] = ()
) -> list[RuleFinding]:
    """Apply all rules and return the findings, errors first.

    Args:
        job: the job from which the manifests were rendered, if it is known.
        crds: schemas to use in place of the schemas that aliquot ships for the same kinds.
    """
    given_kinds = {(schema.group, schema.kind) for schema in crds}
    known = [*crds, *(schema for schema in supported() if (schema.group, schema.kind) not in given_kinds)]
    pools = [pool_view(pool) for pool in select_kinds(manifests, "NodePool")]
    views = job_views(manifests)
    groups: list[Iterable[RuleFinding]] = [
        check_schemas(manifests, known),
        *(check_pool(pool) for pool in pools),
        *(check_node_class(node_class, pools) for node_class in select_kinds(manifests, "EC2NodeClass")),
        check_references(manifests),
        check_storage(views, manifests),
        check_pods_references(views, manifests),
        check_security(views, manifests),
        check_environment(views, pools, manifests),
        *(
            check_job(view, job.section.trainer, job.plan, job.config.checkpoint.grace_s)
            if job is not None
            else check_job(view, None, None, _grace_s(view, manifests))
            for view in views
        ),
        *(check_elastic(view, manifests) for view in views),
        *(check_mounted_config(view, manifests) for view in views),
        *(check_together(view, pools, manifests) for view in views),
        *(check_hugepages(view) for view in views if pools),
        check_secrets(views, manifests),
        check_config(job) if job is not None else (),
    ]
    return errors_first([item for group in groups for item in group])


def _grace_s(view: JobView, manifests: Sequence[ManifestObject]) -> float | None:
    """Return checkpoint.grace_s from a config that the pods mount; None if no config sets a number."""
    for config in configs_of(view, manifests):
        with suppress(TypeError, ValueError):
            return float(dig(config, "checkpoint", "grace_s"))
    return None


def check_job_of_config(job: Job, crds: Sequence[KindSchema] = ()) -> list[RuleFinding]:
    """Check the manifests of `job` without writing them."""
    return check_manifests(parsed(job), job, crds)


def errors_first(findings: Sequence[RuleFinding]) -> list[RuleFinding]:
    """Return the findings without repetitions."""
    return sorted(dict.fromkeys(findings), key=lambda item: item.level != "error")
