"""Two hosts, each a network namespace with a launcher of its own, train what one host trains."""

from __future__ import annotations

import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.multinode.namespaces import Host, environment, kill, switched_hosts, why_not
from tests.runs import curve, has_steps, trained, wait_for, write_config

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


Before = Mapping[int, Sequence[str]]  # what a host starts, with its launcher as arguments
NOTHING: Before = MappingProxyType({})


def start(
    hosts: Sequence[Host], config: Path, *overrides: str, before: Before = NOTHING
) -> list[subprocess.Popen[str]]:
    """A launcher on each host."""
    program = (sys.executable, "-m", "aliquot", "train", str(config), *overrides)
    master = (f"launch.master_address={hosts[0].address}", "launch.master_port=29511")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return [
        subprocess.Popen(
            host.command(*before.get(number, ()), *program, *master, f"launch.node_rank={number}"),
            env=environment(), text=True, **streams,
        )
        for number, host in enumerate(hosts)
    ]  # fmt: skip


def on_both(hosts: Sequence[Host], config: Path, *overrides: str, before: Before = NOTHING) -> list[tuple[int, str]]:
    """Exit code and output of each host's launcher."""
    nodes = start(hosts, config, *overrides, before=before)
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


def trained_on(hosts: Sequence[Host], config: Path, *overrides: str, before: Before = NOTHING) -> str:
    """What the launchers of a run say that ends well."""
    outcomes = on_both(hosts, config, *overrides, before=before)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    return "".join(output for _, output in outcomes)


def killed_when(reached: Callable[[], bool], hosts: Sequence[Host], config: Path, before: Before = NOTHING) -> str:
    """Kill both hosts of a run as soon as `reached`, and return what the first one said."""
    nodes = start(hosts, config, before=before)
    while not reached():
        assert [node.poll() for node in nodes] == [None, None], [node.communicate()[0] for node in nodes]
        time.sleep(0.05)
    for host in hosts:
        kill(host)
    output, _ = (node.communicate(timeout=20)[0] for node in nodes)
    return output


def not_seeing(directory: Path, instead: Path | None = None) -> list[str]:
    """What starts a command to which a directory is empty, or holds what another one does."""
    mount = f'mount -t tmpfs none "{directory}"' if instead is None else f'mount --bind "{instead}" "{directory}"'
    return ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]


# The short cases are "hosts" in tests/engines/test_host_engine.py and two nodes of a job in test_launcher.py.
@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_hosts_train_what_one_does(tmp_path: Path, ranks: int) -> None:
    shard = {"engine": "host"}
    one = write_config(tmp_path, "one", shard=shard, launch={"ranks": 2 * ranks})
    trained(one)
    two = write_config(tmp_path, "two", shard=shard, launch={"ranks": ranks, "nodes": 2, "device": "cpu"})
    with switched_hosts(2) as hosts:
        assert "gloo between hosts" in trained_on(hosts, two)
    # Sums over hosts are made in another order than sums over ranks.
    expected, found = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(found) == 6


# The short case is in tests/distributed/test_gloo_interface.py.
@pytest.mark.long
@pytest.mark.parametrize("nodes", [2, "2:2"])
def test_two_hosts_without_ipv4(tmp_path: Path, nodes: int | str) -> None:
    config = write_config(tmp_path, launch={"nodes": nodes, "device": "cpu"}, train={"max_steps": 2})
    with switched_hosts(2, network="fd77::") as hosts:
        assert "aliquot0 fd77::1" in trained_on(hosts, config)
    assert len(curve(tmp_path / "run")) == 2


@pytest.mark.long
@pytest.mark.parametrize("engine", ["host", "fsdp"])
def test_stop_signal_of_one_host_ends_both_within_a_step(tmp_path: Path, engine: str) -> None:
    sections = {"train": {"max_steps": 3, "global_batch_size": 2000}, "shard": {"engine": engine}}
    trained(write_config(tmp_path, "one", **sections))
    config = write_config(tmp_path, "two", **sections, launch={"ranks": 1, "nodes": 2, "device": "cpu"})
    with switched_hosts(2) as hosts:
        nodes = start(hosts, config)
        wait_for(lambda: has_steps(tmp_path / "two", 1), nodes[0])
        nodes[1].send_signal(signal.SIGTERM)
        outputs = [node.communicate(timeout=100)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [143, 143], outputs
        assert "after step 1, which is saved" in outputs[1]
        trained_on(hosts, config)
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-5)


@pytest.mark.long
def test_gradients_in_bf16_of_a_tied_model(tmp_path: Path) -> None:
    """It starts: of the one weight two sums are rounded, more than the start-up proof allows of exact ones."""
    shape = {"hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = {"config": {"model_type": "llama", **shape, "max_position_embeddings": 64, "tie_word_embeddings": True}}
    shard = {"engine": "host", "reduce_dtype": "bf16"}
    two = write_config(tmp_path, model=model, shard=shard, launch={"ranks": 1, "nodes": 2, "device": "cpu"})
    with switched_hosts(2) as hosts:
        trained_on(hosts, two)
    assert len(curve(tmp_path / "run")) == 6


@pytest.mark.long
def test_fsdp_reports_its_transport_between_hosts(tmp_path: Path) -> None:
    launch = {"ranks": 1, "nodes": 2, "device": "cpu"}
    config = write_config(tmp_path, shard={"engine": "fsdp"}, launch=launch, train={"max_steps": 1})
    with switched_hosts(2) as hosts:
        (code, output), (other_code, other_output) = on_both(hosts, config, "shard.collectives=shared_memory")
        assert (code, other_code) == (2, 2), output + other_output
        assert "shard.collectives: shared_memory is for CPU ranks of one host" in output
        assert "weights and gradients: gloo\n" in trained_on(hosts, config)


@pytest.mark.long
def test_round_robin_ranks_use_tokens_of_their_host(tmp_path: Path) -> None:
    """Started by hand, ranks 0 and 2 on one host, 1 and 3 on the other; neither sees the other's cache."""
    config = write_config(tmp_path, shard={"engine": "fsdp"}, launch={"device": "cpu"}, train={"max_steps": 2})
    caches = [tmp_path / f"cache-{number}" for number in range(2)]
    for cache in caches:
        cache.mkdir()
    with switched_hosts(2) as hosts:
        world = {"WORLD_SIZE": "4", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29511"}
        ranks = []
        for rank in range(4):
            own, other = caches[rank % 2], caches[1 - rank % 2]
            command = hosts[rank % 2].command(*not_seeing(other), sys.executable, "-m", "aliquot", "train", str(config))
            environ = {**environment(), **world, "RANK": str(rank), "ALIQUOT_CACHE": str(own)}
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            ranks.append(subprocess.Popen(command, env=environ, text=True, **streams))
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, "\n".join(outputs)
    assert len(curve(tmp_path / "run")) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("blind", "hidden", "instead", "told"),
    [
        (1, "step-00000004", None, "/step-00000004: {host} does not see the checkpoint that rank 0 sees (/"),
        (1, "step-00000004", "another", "does not see the checkpoint that rank 0 sees (another checkpoint is here)"),
        (0, "step-00000004", None, "/checkpoints: {host} has checkpoint step 4, but rank 0 sees only step 2"),
        (0, "", None, "/checkpoints: this node does not see the files that node 0 writes here"),
    ],
)
def test_node_without_newest_checkpoint_is_named(
    tmp_path: Path, blind: int, hidden: str, instead: str | None, told: str
) -> None:
    """On the others it is not called damaged, and no older one is taken instead."""
    launch = {"ranks": 1, "nodes": 2, "device": "cpu"}
    every = {"every": 2, "export": False}
    config = write_config(tmp_path, shard={"engine": "host"}, launch=launch, checkpoint=every)
    with switched_hosts(2) as hosts:
        trained_on(hosts, config, "train.max_steps=4")
        shutil.copytree(tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path / "another")
        other = tmp_path / instead if instead is not None else None
        hide = not_seeing(tmp_path / "run" / "checkpoints" / hidden, other)
        seen = on_both(hosts, config, before={blind: hide})
        assert [code for code, _ in seen] == [2, 2], seen
        assert all(told.format(host=platform.node()) in output.splitlines()[-1] for _, output in seen), seen
        trained_on(hosts, config)
    assert sorted(curve(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
