"""Hosts whose messages are late and seen in another order, and hosts of which one ends at any moment of a step."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engines.cases import EngineSetup
from tests.engines.test_engines import Runs
from tests.engines.test_host_engine import same
from tests.examples import examples
from tests.processes import run_ranks

WORKER = Path(__file__).parent / "disturbed_worker.py"
ONCE = ["llama-once", "llama-bf16-once", "qwen2-tied-once"]  # of which hosts compute the bits of one

Folder = Callable[[], Path]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A new one each time."""
    return lambda: tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Runs[int]:
    return Runs(tmp_path_factory.mktemp("one"), {size: (EngineSetup("host", size), ONCE) for size in (2, 3)})


@pytest.mark.long
@pytest.mark.timeout(3600)  # an example takes a minute on a busy machine
@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # which makes a new folder each time
    phases=[Phase.generate],  # to look for a smaller example takes seconds each
)
@given(
    name=st.sampled_from(ONCE),
    hosts=st.sampled_from([2, 3]),
    under_way=st.integers(1, 20_000),
    message=st.integers(1, 5000),
    published=st.integers(100, 3000),
    delays_ms=st.lists(st.sampled_from([0, 0, 0, 1, 3, 10, 30]), min_size=1, max_size=40),
)
def test_late_and_reordered_messages_change_no_bit(
    one_host: Runs[int],
    folder: Folder,
    name: str,
    hosts: int,
    under_way: int,
    message: int,
    published: int,
    delays_ms: list[int],
) -> None:
    """With little room for what is under way, and messages and weights in pieces of any length."""
    disturbance = {"under_way": under_way, "message": message, "published": published, "delays_ms": delays_ms}
    disturbed = folder()
    run_ranks(WORKER, hosts, disturbed, name, json.dumps(disturbance))
    same(one_host[hosts], disturbed, name, hosts)


def ended(folder: Path, hosts: int, name: str, moment: int) -> str:
    """The last host ends at a moment, and the others must within seconds, naming it; what it was about to do."""
    begun = time.monotonic()
    run_ranks(WORKER, hosts, folder, name, json.dumps({"ends_at": moment}), timeout_s=60)
    assert time.monotonic() - begun < 40
    notes = [json.loads((folder / f"lost-{rank}.json").read_text()) for rank in range(hosts - 1)]
    # The first to notice ends, and another one that waits for it may say so instead.
    first = min(notes, key=lambda lost: lost["at"])
    assert first["named"], notes
    assert first["message"].startswith(f"rank {hosts - 1} has ended on another host"), notes
    return (folder / "moments").read_text().split()[-1]


MOMENTS = {"needs": 2, "receives": 10, "sends": 10, "compares": 1, "norm": 1}  # kinds, and how many are tried


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "hosts"), [("llama-bf16-once", 2), ("qwen2-tied", 2), ("llama-reduced-once", 2), ("llama-once", 3)]
)
def test_host_that_ends_in_an_exchange_is_named_at_once(folder: Folder, name: str, hosts: int) -> None:
    """Before each kind of thing that it does to meet the others, and at moments between."""
    whole = folder()
    run_ranks(WORKER, hosts, whole, name, json.dumps({"ends_at": -1}))
    kinds = (whole / "moments").read_text().split()
    by_kind = {kind: [at for at, seen in enumerate(kinds) if seen == kind] for kind in set(kinds)}
    assert by_kind.keys() == MOMENTS.keys()
    draw = random.Random(name)
    for kind, count in MOMENTS.items():
        for moment in draw.sample(by_kind[kind], min(count, len(by_kind[kind]))):
            assert ended(folder(), hosts, name, moment) == kind
