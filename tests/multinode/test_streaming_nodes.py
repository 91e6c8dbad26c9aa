"""Two hosts with data caches of their own tokenise two streams during training, are killed, and have one curve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs
from tests.multinode.namespaces import switched_hosts, why_not
from tests.multinode.test_namespaces import killed_when, not_seeing, trained_on
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
        killed_when(
            (tmp_path / "nodes/two/checkpoints/step-00000004/manifest.json").exists, hosts, two, before={1: elsewhere}
        )
    assert len(runs.curve(tmp_path / "nodes/two")) < 40, "the run was over before it was killed"
    with switched_hosts(2) as hosts:
        assert "resuming from" in trained_on(hosts, two, before={1: elsewhere})
    segments = [sorted(path.parent.name for path in cache.glob("tokens/*/*/segment.json")) for cache in caches]
    assert segments[0] == segments[1] and len(segments[0]) > 4
    for key in ("loss", "loss_often", "loss_rarely"):
        expected = runs.curve(tmp_path / "runs/whole", key)
        assert runs.curve(tmp_path / "nodes/two", key) == pytest.approx(expected, rel=1e-4)
