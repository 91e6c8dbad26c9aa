"""Two hosts, each a network namespace with a launcher of its own, train what one host trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multinode.namespaces import Host, environment, two_hosts, why_not
from tests.runs import curve, trained, write_config

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def start(host: Host, config: Path, *overrides: str) -> subprocess.Popen[str]:
    command = host.command(sys.executable, "-m", "aliquot", "train", str(config), *overrides)
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_hosts_train_what_one_does(tmp_path: Path, ranks: int) -> None:
    shard = {"engine": "host"}
    one = write_config(tmp_path, "one", shard=shard, launch={"ranks": 2 * ranks})
    trained(one)
    two = write_config(tmp_path, "two", shard=shard, launch={"ranks": ranks, "nodes": 2, "device": "cpu"})
    with two_hosts() as hosts:
        nodes = [
            start(
                host,
                two,
                f"launch.node_rank={number}",
                f"launch.master_address={hosts[0].address}",
                "launch.master_port=29511",
            )
            for number, host in enumerate(hosts)
        ]
        outputs = [node.communicate(timeout=200)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    # Sums over hosts are made in another order than sums over ranks.
    expected, found = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(found) == 6
