"""Two hosts with data caches of their own tokenise two streams during training, are killed, and have one curve."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import runs
from tests.multinode.namespaces import kill, switched_hosts, why_not
from tests.multinode.test_namespaces import not_seeing, on_both, start
from tests.run.test_streaming_run import config, corpus

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


def test_weighted_streams_on_two_hosts(tmp_path: Path) -> None:
    sources: list[dict[str, object]] = [
        {"name": name, "path": str(corpus(tmp_path / name)), "document": "line", "weight": weight}
        for name, weight in (("often", 3), ("rarely", 1))
    ]
    (tmp_path / "often/tokenizer").rename(tmp_path / "tokenizer")
    runs.trained(config(tmp_path / "runs", "whole", sources, steps=40))
    two = config(tmp_path / "nodes", "two", sources, steps=40, launch={"ranks": 2, "nodes": 2, "device": "cpu"})
    caches = [tmp_path / "nodes/cache", tmp_path / "other"]
    for cache in caches:
        cache.mkdir()
    elsewhere = not_seeing(caches[0], instead=caches[1])
    with switched_hosts(2, "10mbit") as hosts:  # slow, so that the run lasts until it is killed
        nodes = [
            start(host, two, f"launch.node_rank={number}", f"launch.master_address={hosts[0].address}", before=before)
            for number, (host, before) in enumerate(zip(hosts, ((), elsewhere), strict=True))
        ]
        while not (tmp_path / "nodes/two/checkpoints/step-00000004/manifest.json").exists():
            assert [node.poll() for node in nodes] == [None, None], [node.communicate()[0] for node in nodes]
            time.sleep(0.05)
        for host in hosts:
            kill(host)
        for node in nodes:
            node.communicate(timeout=20)
    assert len(runs.curve(tmp_path / "nodes/two")) < 40, "the run was over before it was killed"
    with switched_hosts(2) as hosts:
        outcomes = on_both(hosts, two, before={1: elsewhere})
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert "resuming from" in outcomes[0][1]
    segments = [sorted(path.parent.name for path in cache.glob("tokens/*/*/segment.json")) for cache in caches]
    assert segments[0] == segments[1] and len(segments[0]) > 4
    for key in ("loss", "loss_often", "loss_rarely"):
        expected = runs.curve(tmp_path / "runs/whole", key)
        assert runs.curve(tmp_path / "nodes/two", key) == pytest.approx(expected, rel=1e-4)
