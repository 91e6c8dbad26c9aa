"""Nodes that come and go, by chance: four hosts, ten events, the losses of a run that nothing disturbed.

    python -m tests.multinode.test_elastic [--events 10] [--seed 0] [--network-files]

prints for each event for how long no new step was done. With --network-files the run lies on a file system of the same
network: a host that is cut off does not reach it either.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from aliquot.distributed.leader_lease import newest_round
from aliquot.observe.metrics import last_point
from tests.multinode import network_file_system
from tests.multinode.namespaces import Host, environment, kill, lift_limit, plug, switch_of, switched_hosts, why_not
from tests.runs import curve, write_config

STEPS = 1000
LINK = "4mbit"  # a step takes half a second: the run lasts until all has happened
FEWEST, MOST = 2, 4
SECTIONS = {
    "shard": {"engine": "host"},
    "train": {"max_steps": STEPS, "global_batch_size": 6},
    "checkpoint": {"every": 10, "export": False},
}
KINDS = ("killed", "told to stop", "cut off")


@dataclass
class Cluster:
    """Hosts with a launcher each, of which some are away, and when the run has come to which step."""

    hosts: list[Host]
    config: Path
    directory: Path
    nodes: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)  # to stop
    times: list[tuple[float, int]] = field(default_factory=list)
    mounted: list[str] = field(default_factory=list)  # what a node's command begins with

    def start(self, number: int) -> None:
        command = self.hosts[number].command(*self.mounted, sys.executable, "-m", "aliquot", "train", str(self.config))
        with (self.config.parent / f"node-{number}.txt").open("a") as told:
            self.nodes[number] = subprocess.Popen(command, env=environment(), stdout=told, stderr=told, text=True)

    def look(self) -> int:
        """The highest step so far; call it often."""
        step = last_point(self.directory / "metrics.jsonl", "step")[0]
        if step > (self.times[-1][1] if self.times else 0):
            self.times.append((time.monotonic(), step))
        time.sleep(0.05)
        return self.times[-1][1] if self.times else 0

    def here(self) -> list[int]:
        away = self.cut | self.told
        return [number for number, node in self.nodes.items() if node.poll() is None and number not in away]

    def disturb(self, kind: str, number: int) -> None:
        if kind == "killed":
            kill(self.hosts[number])
            self.nodes[number].wait(10)
        elif kind == "told to stop":
            self.nodes[number].send_signal(signal.SIGTERM)
            self.told.add(number)
        elif kind == "cut off":
            plug(self.hosts[number], False)
            self.cut.add(number)
        elif number in self.cut:
            plug(self.hosts[number], True)
            self.cut.remove(number)
            assert self.nodes[number].poll() is None, "it should have waited for its cable"
        else:
            self.nodes[number].wait(60)  # it may still be leaving
            self.told.discard(number)
            self.start(number)

    def lost_s(self, begun: float, before: int, limit_s: float = 180) -> float:
        """The longest time without a new step since `begun`, until those that are here have done one together.

        `before`: how often ranks had begun to train by then."""
        until, beginning = time.monotonic() + limit_s, None
        while time.monotonic() < until:
            step = self.look()
            if beginning is None and len(self.here()) in self.beginnings()[before:]:
                beginning = step
            if beginning is not None and step > beginning:
                earlier = [at for at, _ in self.times if at <= begun][-1:]
                later = [at for at, _ in self.times if at > begun]
                return max(b - a for a, b in pairwise([*earlier, *later]))
        raise TimeoutError(f"{len(self.here())} nodes do not come together: {self.beginnings()}")

    def leads(self, number: int) -> bool:
        claim = json.loads((self.directory / ".rounds" / f"{newest_round(self.directory):08d}.json").read_text())
        return self.hosts[number].address == str(claim["address"])

    def ends(self, steps: int, limit_s: float) -> None:
        """Give back to all hosts what was taken, and wait for the end of a run of so many steps."""
        assert self.look() < steps, "the run was over before all had happened"
        for host in self.hosts:
            plug(host, True)
            lift_limit(host)
        self.cut.clear()
        for number in self.here():
            told = self.config.parent / f"node-{number}.txt"
            assert self.nodes[number].wait(limit_s) == 0, told.read_text()[-2000:]

    def beginnings(self) -> list[int]:
        """How many nodes there were whenever ranks began to train."""
        events = self.directory / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("}")]
        return [int(event["world_size"]) for event in told if event["event"] in ("start", "resume")]


@contextmanager
def running(config: Path, link: str, most: int, network_files: bool = False) -> Iterator[Cluster]:
    """A run that has begun on `most` hosts."""
    with ExitStack() as stack:
        hosts = stack.enter_context(switched_hosts(most, link))
        cluster = Cluster(hosts, config, config.with_suffix(""))
        if network_files:
            cluster.mounted = stack.enter_context(network_file_system.served(config.parent, switch_of(hosts[0])))
        try:
            for number in range(most):
                cluster.start(number)
            while cluster.look() < 3:
                assert cluster.here(), "no node is left"
            yield cluster
        finally:
            for host in hosts:
                kill(host)
            for node in cluster.nodes.values():
                node.wait(10)


def disturbed(folder: Path, events: int, seed: int, network_files: bool = False) -> list[tuple[str, float]]:
    """What was done to which node, and the seconds without a new step. Raises AssertionError where losses differ."""
    os.environ |= {"ALIQUOT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    whole = write_config(folder, "whole", **SECTIONS, launch={"ranks": 1, "device": "cpu"})
    subprocess.run([sys.executable, "-m", "aliquot", "train", str(whole)], check=True, capture_output=True)
    launch = {"ranks": 1, "device": "cpu", "nodes": f"{FEWEST}:{MOST}", "join_timeout_s": 900}
    config = write_config(folder, "disturbed", **SECTIONS, launch=launch)
    draw, found = random.Random(seed), []
    with running(config, LINK, MOST, network_files) as cluster:
        for _ in range(events):
            end = time.monotonic() + draw.uniform(1, 6)
            while time.monotonic() < end:
                cluster.look()
            here = cluster.here()
            away = [number for number in range(MOST) if number not in here]
            comes = len(here) <= FEWEST or (away and draw.random() < 0.5)
            kind, number = ("back", draw.choice(away)) if comes else (draw.choice(KINDS), draw.choice(here))
            before, begun = len(cluster.beginnings()), time.monotonic()
            leads = cluster.leads(number)
            cluster.disturb(kind, number)
            lost_s = cluster.lost_s(begun, before)
            what = f"node {number}{', which led,' if leads else ''} {kind}"
            found.append((what, lost_s))
            print(f"{what:32} {lost_s:5.1f} s without a new step, then {len(cluster.here())} nodes", flush=True)
        cluster.ends(STEPS, 600 if network_files else 300)
    expected, losses = curve(folder / "whole"), curve(folder / "disturbed")
    assert list(losses) == list(expected)
    differences = [abs(losses[step] / expected[step] - 1) for step in expected]
    print(f"{len(losses)} losses, at most {max(differences):.1e} off those of an undisturbed run")
    assert max(differences) < 1e-4
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_elastic_nodes(tmp_path: Path) -> None:
    assert len(disturbed(tmp_path, events=10, seed=0)) == 10


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.skipif(network_file_system.why_not() is not None, reason=str(network_file_system.why_not()))
def test_elastic_nodes_on_network_file_system(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    assert len(disturbed(tmp_path / "shared", events=6, seed=1, network_files=True)) == 6


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network-files", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "shared"
        folder.mkdir()
        disturbed(folder, arguments.events, arguments.seed, arguments.network_files)
