"""The shipped facts are those of the real CRDs and of Kubernetes' own schemas."""

from __future__ import annotations

import pytest

from aliquot.cluster.kind_schemas import supported
from aliquot.cluster.schemas import check_schema
from tests.cluster.crd import CRDS, needs_crds
from tests.tools.cluster_facts import FILE, facts


@needs_crds
def test_facts_equal_the_crds() -> None:
    assert FILE.read_text() == facts(CRDS), "python -m tests.tools.cluster_facts --crds DIR"


@pytest.mark.long
def test_facts_are_schemas() -> None:
    """Which is not looked at again where they are used: it takes seconds."""
    assert all(each.shipped for each in supported())
    for each in supported():
        check_schema(each)
