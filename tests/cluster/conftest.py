from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.apiserver import api_server
from tests.cluster.crd import TRAINERS


@pytest.fixture(scope="session", params=TRAINERS)
def trainer(request: pytest.FixtureRequest) -> Iterator[str]:
    """The version of Kubeflow Trainer whose CRDs a running API server has."""
    with api_server(request.param):
        yield request.param
