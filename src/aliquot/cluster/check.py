"""`aliquot cluster check`: all rules over manifests, with the config and the plan where they are known."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from aliquot.cluster.crds import KindSchema, supported
from aliquot.cluster.findings import RuleFinding
from aliquot.cluster.job import Job
from aliquot.cluster.job_view import JobView, configs_of, job_views
from aliquot.cluster.manifests import ManifestObject, dig, of_kind
from aliquot.cluster.node_pool_view import pool_view
from aliquot.cluster.render import parsed
from aliquot.cluster.rules_config import check_config
from aliquot.cluster.rules_job import check_config_maps, check_elastic, check_job
from aliquot.cluster.rules_nodes import check_node_class, check_pool, check_references
from aliquot.cluster.rules_references import check_pods_references
from aliquot.cluster.rules_scheduling import check_together
from aliquot.cluster.rules_schemas import check_schemas
from aliquot.cluster.rules_security import check_security
from aliquot.cluster.rules_storage import check_storage


def check_manifests(
    manifests: Sequence[ManifestObject], job: Job | None = None, crds: Sequence[KindSchema] = ()
) -> list[RuleFinding]:
    """Errors first. `job`: what the manifests were rendered from; `crds`: what counts instead of what is shipped."""
    own = {(each.group, each.kind) for each in crds}
    known = [*crds, *(each for each in supported() if (each.group, each.kind) not in own)]
    found = list(check_schemas(manifests, known))
    pools = [pool_view(pool) for pool in of_kind(manifests, "NodePool")]
    for pool in pools:
        found.extend(check_pool(pool))
    for node_class in of_kind(manifests, "EC2NodeClass"):
        found.extend(check_node_class(node_class, pools))
    found.extend(check_references(manifests))
    found.extend(check_storage(manifests))
    trainer, plan, grace_s = (
        (job.section.trainer, job.plan, job.config.checkpoint.grace_s) if job is not None else (None, None, None)
    )
    views = job_views(list(manifests))
    found.extend(check_pods_references(views, manifests))
    found.extend(check_security(views, manifests))
    for view in views:
        found.extend(check_job(view, trainer, plan, _grace_s(view, manifests) if grace_s is None else grace_s))
        found.extend(check_elastic(view, manifests))
        found.extend(check_together(view, pools, manifests))
    found.extend(check_config_maps(manifests))
    if job is not None:
        found.extend(check_config(job))
    return in_order(found)


def _grace_s(view: JobView, manifests: Sequence[ManifestObject]) -> float | None:
    """Of the config that the pods mount."""
    for config in configs_of(view, manifests):
        with suppress(TypeError, ValueError):
            return float(dig(config, "checkpoint", "grace_s"))
    return None


def check_job_of_config(job: Job, crds: Sequence[KindSchema] = ()) -> list[RuleFinding]:
    """What a render of `job` would hold, checked without writing it."""
    return check_manifests(parsed(job), job, crds)


def in_order(findings: Sequence[RuleFinding]) -> list[RuleFinding]:
    unique = list(dict.fromkeys(findings))
    return sorted(unique, key=lambda each: each.level != "error")
