"""Shared by all tests: where optional data lies, and a cache of tokens that no other run sees."""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import tests.examples  # noqa: F401 (the profiles)
from aliquot.machine.cpu import read_cpu
from aliquot.planner.machine_profile import keep

if TYPE_CHECKING:
    from tests.run.hub_repository import Repository
    from tests.stores.s3_server import S3Server

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
# Read when torch is imported: threads that wait leave the core to others. A test run has more threads than cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.load_profile("short")  # `make test-long` asks for another: --hypothesis-profile=full

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"


RATES = {  # no machine's
    "products": {size: [[128.0, 1e11], [1024.0, 1e12]] for size in ("2", "4")},
    "memory": {kind: [[1e6, 1e10], [1e7, 5e9]] for kind in ("stream", "exp", "transpose")},
    "call_s": 5e-6,
    "socket_bytes_per_s": 1e9,
    "spread": 0.0,
}

# Files that take longest: begun first, so that of several workers none has much to do when the others are done.
LONGEST = (
    "test_train.py", "test_host_engine.py", "test_engines.py", "test_planner.py", "test_elastic.py", "test_adapter.py",
    "test_observed.py", "test_rendezvous.py", "test_launcher.py", "test_settings_search.py", "test_shutdown.py",
    "test_offers.py", "test_check.py", "test_docs.py", "test_checkpoint.py", "test_remote_checkpoints.py",
    "test_deepspeed.py", "test_preferences.py", "test_watchdog.py", "test_stages.py", "test_architectures.py",
    "test_once_a_step.py", "test_aws_account.py", "test_compatibility.py", "test_house.py",
)  # fmt: skip


gc.disable()  # what is imported and collected stays until the end; to look through it again and again takes seconds


def pytest_collection_finish() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the other worker has the other core
        importlib.import_module("torch").set_num_threads(1)
    if "botocore.loaders" in sys.modules:
        _read_aws_models_once()
    gc.freeze()
    gc.enable()


def _read_aws_models_once() -> None:
    """Without this, each session of boto3 reads them anew: JSON that takes a second."""
    from botocore.loaders import JSONFileLoader

    load = JSONFileLoader.load_file
    load_once = cache(lambda path: load(JSONFileLoader(), path))
    JSONFileLoader.load_file = lambda _, path: load_once(path)


def pytest_configure() -> None:
    if os.environ.get("FILE_ORDER") == "random":  # drawn before xdist starts its workers, which must agree
        os.environ["FILE_ORDER"] = str(random.SystemRandom().randrange(10_000))


def pytest_sessionstart(session: pytest.Session) -> None:
    if (seed := os.environ.get("FILE_ORDER")) and "PYTEST_XDIST_WORKER" not in os.environ:
        session.config.get_terminal_writer().line(f"order of files: make test SEED={seed}")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        if (few := item.get_closest_marker("few")) and item.get_closest_marker("long") is None:
            seen[name := item.nodeid.partition("[")[0]] += 1
            if seen[name] > few.args[0]:
                item.add_marker(pytest.mark.long)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if seed := os.environ.get("FILE_ORDER"):
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)
        shuffled = {path: place for place, path in enumerate(files)}
        items.sort(key=lambda item: shuffled[item.path])  # tests within a file share fixtures and keep their order


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In which this machine is known: to measure it takes a second, and tests of it say that it is not."""
    base = tmp_path_factory.getbasetemp()
    # What one worker has found out about a model the other one need not.
    of_all = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["ALIQUOT_CACHE"] = str(of_all / "cache")
    for ranks, threads in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1)):
        keep(read_cpu(), ranks, threads, RATES)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    from tests.stores.s3_server import s3_server

    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A hub, and a client that is logged in; the client has read its environment when it was imported."""
    from tests.run.hub_repository import hub_repository

    with hub_repository() as repository:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", repository.address)
        template = f"{repository.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        yield repository


@pytest.fixture(scope="session")
def shared() -> Path:
    """The data directory beside the repository; a test that asks for it is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared (models and texts that are not part of the repository)")
    return SHARED
