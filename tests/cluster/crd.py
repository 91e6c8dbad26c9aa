"""The real CustomResourceDefinitions, which are not part of the repository, and what they say of an object."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from aliquot.cluster.kind_schemas import KindSchema, read_crds, schemas_of_kind
from aliquot.cluster.schemas import violations
from tests.conftest import SHARED

CRDS = SHARED / "crds"
TRAINERS = ("2.1", "2.3")
_JOBSETS = {"2.1": "jobset-v0.10.1", "2.3": "jobset-v0.12.0"}  # that Trainer brings

needs_crds = pytest.mark.skipif(not CRDS.is_dir(), reason="needs ../shared/crds (not part of the repository)")


def problems(document: dict[str, Any], trainer: str = "2.3") -> list[str]:
    """What the API server would say about `document`; empty: it would take it."""
    (schema,) = schemas_of_kind(document, schemas(trainer))
    return [f"{each.message}: {each.fix}" for each in violations(document, schema)]


def is_custom(document: dict[str, Any]) -> bool:
    return bool(schemas_of_kind(document, schemas("2.3")))


@cache
def schemas(trainer: str) -> list[KindSchema]:
    """Of a cluster that has this version of Kubeflow Trainer."""
    folders = ("karpenter-aws-v1.14.1", f"trainer-v{trainer}.0", _JOBSETS[trainer])
    return [each for folder in folders for each in read_crds(CRDS / folder)]
