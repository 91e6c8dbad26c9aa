"""The shipped facts are those of the real CRDs and of Kubernetes' own schemas."""

from __future__ import annotations

from aliquot.cluster.crds import supported
from tests.cluster.crd import CRDS, needs_crds
from tests.cluster_facts import FILE, facts


@needs_crds
def test_they_are_what_the_crds_say() -> None:
    assert FILE.read_text() == facts(CRDS), "python -m tests.cluster_facts --crds DIR"


def test_each_kind_says_its_version() -> None:
    found = {(each.kind, each.source) for each in supported()}
    assert {
        ("NodePool", "Karpenter 1.14.1"), ("TrainJob", "Kubeflow Trainer 2.3.0"),
        ("TrainJob", "Kubeflow Trainer 2.1.0"), ("JobSet", "JobSet 0.12.0"), ("LocalQueue", "Kueue 0.19.2"), ("StorageClass", "Kubernetes 1.34"),
    } <= found  # fmt: skip
