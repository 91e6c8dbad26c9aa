"""Shared by all tests: where optional data lies, and a cache of tokens that no other run sees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

import tests.examples  # noqa: F401 (the profiles)

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
# Read when torch is imported: threads that wait leave the core to others. A test run has more threads than cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.load_profile("short")  # `make test-long` asks for another: --hypothesis-profile=full

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"


# Files that take longest: begun first, so that of several workers none has much to do when the others are done.
LONGEST = (
    "test_train.py", "test_engines.py", "test_observed.py", "test_host.py", "test_rendezvous.py", "test_launch.py",
    "test_terminal.py", "test_collectives.py", "test_other_checks.py", "test_deepspeed.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["ALIQUOT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def shared() -> Path:
    """The data directory beside the repository; a test that asks for it is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared (models and texts that are not part of the repository)")
    return SHARED
