"""A cable that is cut while no step runs: both nodes end soon, and say what was going on."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multinode.namespaces import INTERFACE, Host, environment, plug, switched_hosts, why_not
from tests.runs import WORDS, wait_until, write_config
from tests.slow_disk import slow_disk

pytestmark = [pytest.mark.long, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

TIMEOUT_S = 6


def unplug(hosts: list[Host], _nodes: list[subprocess.Popen[str]]) -> None:
    plug(hosts[1], False)


def cut_while(
    tmp_path: Path, stalls_in: str, sections: dict[str, Any], reached: Any, cut: Any = unplug
) -> list[tuple[int, str]]:
    """Exit code and output of each node, whose cable is cut when `reached` has returned."""
    launch = {"ranks": 1, "nodes": 2, "device": "cpu", "step_timeout_s": TIMEOUT_S, "master_port": 29511}
    given = {"launch": launch, "train": {"max_steps": 1, "global_batch_size": 2, "per_device_train_batch_size": 1}}
    for name, values in sections.items():
        given.setdefault(name, {}).update(values)
    config = write_config(tmp_path, **given)
    known = environment()
    known |= slow_disk(tmp_path, stalls_in, 600, known["PYTHONPATH"]) | {"GLOO_SOCKET_IFNAME": INTERFACE}

    def started(host: Host, number: int, master: Host) -> subprocess.Popen[str]:
        own = [f"launch.node_rank={number}", f"launch.master_address={master.address}"]
        command = host.command(sys.executable, "-m", "aliquot", "train", str(config), *own)
        return subprocess.Popen(command, env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    with switched_hosts(2) as hosts:
        nodes = [started(host, number, hosts[0]) for number, host in enumerate(hosts)]
        try:
            reached()
            time.sleep(2)  # the others wait by now
            cut(hosts, nodes)
            outputs = [node.communicate(timeout=5 * TIMEOUT_S + 30)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


@pytest.mark.parametrize(
    ("where", "doing"),
    [
        ("cache", "reading and tokenising the data"),
        ("checkpoints", "saving step 1"),
        ("export", "exporting the model"),
    ],
)
def test_before_and_after_all_steps(tmp_path: Path, where: str, doing: str) -> None:
    sections = {"data": {"cache_directory": str(tmp_path / "cache")}}
    ended = cut_while(tmp_path, where, sections, lambda: wait_until((tmp_path / "now").exists))
    for number, (code, output) in enumerate(ended):
        assert code == 1, output
        other = 1 - number
        assert f"no word from node {other} (" in output and f", {doing}) for" in output, output
        assert f"while node {number} was {doing}" in output, output


def test_stopped_node_is_reported_during_tokenization(tmp_path: Path) -> None:
    def stop(_hosts: list[Host], nodes: list[subprocess.Popen[str]]) -> None:
        nodes[1].terminate()

    sections = {"data": {"cache_directory": str(tmp_path / "cache")}, "launch": {"step_timeout_s": 60}}
    began = time.monotonic()
    first, second = cut_while(tmp_path, "cache", sections, lambda: wait_until((tmp_path / "now").exists), stop)
    assert second[0] == 143 and "stopped by SIGTERM before the first step was done: nothing is lost" in second[1]
    assert first[0] == 1 and "node 1 (" in first[1], first[1]
    assert ") was stopped by SIGTERM while reading and tokenising the data [peer-lost]" in first[1], first[1]
    assert time.monotonic() - began < 50, "it did not wait for launch.step_timeout_s"


def test_in_an_evaluation(tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.txt"
    draw = random.Random(1)
    held_out.write_text("\n".join(" ".join(draw.choices(WORDS, k=30)) for _ in range(6_000)))
    sections = {
        "data": {"eval_fraction": 0, "eval_path": str(held_out)},
        "train": {"max_steps": 2, "eval_steps": 1, "logging_steps": 1},
    }
    ended = cut_while(tmp_path, "nowhere", sections, lambda: wait_until((tmp_path / "run" / "metrics.jsonl").exists))
    for code, output in ended:
        assert code == 1, output
        assert "evaluating" in output or "[hung]" in output, output
