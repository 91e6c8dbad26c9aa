"""Run `aliquot cluster check`: apply all rules to manifests and, if known, to the run's config and plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aliquot.cluster.capacity import check_admission
from aliquot.cluster.comparison import check_invariants, check_mounted_config, rendered_job
from aliquot.cluster.findings import RuleFinding
from aliquot.cluster.job import Job
from aliquot.cluster.job_view import job_views
from aliquot.cluster.kind_schemas import KindSchema, supported
from aliquot.cluster.manifests import ManifestObject, select_kinds
from aliquot.cluster.node_fields import check_node_class, check_pool, check_references
from aliquot.cluster.node_pool_view import pool_view
from aliquot.cluster.render import parsed
from aliquot.cluster.rules_config import check_config
from aliquot.cluster.rules_environment import check_environment
from aliquot.cluster.rules_job import check_job
from aliquot.cluster.rules_references import check_pods_references
from aliquot.cluster.rules_scheduling import check_together
from aliquot.cluster.rules_schemas import check_schemas
from aliquot.cluster.rules_security import check_secrets, check_security
from aliquot.cluster.storage_fields import check_storage


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
        check_schemas(manifests, known),
        *(check_pool(pool) for pool in pools),
        *(check_node_class(node_class, pools) for node_class in select_kinds(manifests, "EC2NodeClass")),
        check_references(manifests),
        check_storage(views, manifests),
        check_pods_references(views, manifests),
        check_security(views, manifests),
        check_environment(views, pools, manifests),
        *(
            check_job(view, twin.section.trainer, twin.plan, twin.config.checkpoint.grace_s)
            if twin is not None
            else check_job(view, None, None, None)
            for view, twin in twins
        ),
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
