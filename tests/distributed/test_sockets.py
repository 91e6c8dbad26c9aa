"""What a running job listens on, and what a stranger who reaches those sockets can do: nothing."""

from __future__ import annotations

import os
import pickle
import re
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistStoreError,
    HashStore,
    Store,
    TCPStore,
)

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import LaunchError, RendezvousError, StorageError
from aliquot.distributed.rendezvous import NodeGroup, meet_nodes
from aliquot.distributed.run_secret import SECRET_FILE, SECRET_VARIABLE, common_secret
from aliquot.distributed.signed_store import SignedStore, sign_store
from aliquot.distributed.store_server import connection_failure
from tests.distributed.launcher import environment
from tests.distributed.test_rendezvous import free_port, last_lines, node, started
from tests.runs import curve, trained, write_config
from tests.tools import warm

WILDCARDS = ("0.0.0.0", "::", "::ffff:0.0.0.0")
ENTRY = "/aliquot/nodes/0"  # the key of node 0's first entry
JUNK = [os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"[" * 60_000 + b"\n", b"\x00" * 8, b""]


def listeners(launcher: int) -> set[tuple[int, str, int]]:
    """Process id, address and port of every listening socket of a launcher and all processes that it started."""
    found = set()
    for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((process.pid, connection.laddr.ip, connection.laddr.port))
    return found


@contextmanager
def training(config: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], set[tuple[int, str, int]]]]:
    """A launcher whose ranks have done two steps, and all sockets that listened at any time until then."""
    run = config.with_suffix("")
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    launcher = warm.popen("-m", "aliquot", "train", config, *overrides, **streams)
    seen: set[tuple[int, str, int]] = set()
    try:
        while not (run / "metrics.jsonl").exists() or len(curve(run)) < 2:
            assert launcher.poll() is None, launcher.communicate()[1]
            seen |= listeners(launcher.pid)
            time.sleep(0.02)
        yield launcher, seen | listeners(launcher.pid)
    finally:
        launcher.kill()
        launcher.wait()


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def forge(port: int, payload: bytes) -> int:
    """Replace every value of the store at `port`, and that of torch's c10d rendezvous; how many there were."""
    stranger = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), False)
    keys = stranger.list_keys()
    for key in {*keys, "torch.rendezvous.aliquot", "/torch.rendezvous.aliquot"}:
        stranger.set(key, payload)  # type: ignore[arg-type]
    return len(keys)


def test_single_node_listens_on_loopback_and_ignores_strangers(tmp_path: Path) -> None:
    config, executed = write_config(tmp_path, launch={"ranks": 2}), tmp_path / "executed"
    endless = ["train.max_steps=100000", "train.lr_scheduler_type=constant"]
    with training(config, *endless) as (launcher, sockets):
        assert sockets and {address for _, address, _ in sockets} == {"127.0.0.1"}
        assert {pid for pid, _, _ in sockets} > {launcher.pid}, "gloo of the ranks listens, too"
        for _, address, port in listeners(launcher.pid):
            for junk in JUNK:
                with socket.create_connection((address, port)) as stranger, suppress(OSError):
                    stranger.sendall(junk)
        (store,) = {port for pid, _, port in listeners(launcher.pid) if pid == launcher.pid}
        assert forge(store, pickle.dumps(Payload(executed)))
        steps, until = len(curve(tmp_path / "run")), time.monotonic() + 1
        while len(curve(tmp_path / "run")) < steps + 5 or time.monotonic() < until:
            assert launcher.poll() is None and not executed.exists()
            time.sleep(0.02)
        launcher.terminate()
        _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 143 and "stopped by SIGTERM after step" in errors, errors
    assert not executed.exists()


@pytest.mark.long
@pytest.mark.parametrize("engine", ["host", "fsdp"])
def test_forged_store_values_do_not_change_training(tmp_path: Path, engine: str) -> None:
    sections: dict[str, Any] = {"launch": {"ranks": 2}, "shard": {"engine": engine}, "train": {"max_steps": 200}}
    trained(write_config(tmp_path, "alone", **sections))
    with training(write_config(tmp_path, "disturbed", **sections)) as (launcher, sockets):
        (store,) = {port for pid, _, port in sockets if pid == launcher.pid}
        forge(store, b"forged")
        assert launcher.wait(timeout=200) == 0
    assert curve(tmp_path / "disturbed") == curve(tmp_path / "alone")


@pytest.mark.long
def test_elastic_run_listens_on_no_wildcard(tmp_path: Path) -> None:
    config = write_config(tmp_path, launch={"ranks": 2, "nodes": "1:2"})
    with training(config, "train.max_steps=100000") as (_, sockets):
        assert sockets and not [each for each in sockets if each[1] in WILDCARDS]


def test_unsigned_values_are_absent() -> None:
    bare = HashStore()
    store, twin = SignedStore(bare, "secret", "run"), SignedStore(bare, "secret", "run", "group/")
    store.set("key", "value")
    assert store.get("key") == b"value" and store.check(["key"]) and not store.is_forged("key")
    copies = {"another key": bare.get("run/key"), "junk": b"value", "none": b"", "cut": bare.get("run/key")[:-1]}
    for key, copy in copies.items():
        bare.set(f"run/{key}", copy)
        assert not store.check([key]) and store.is_forged(key), key
        with pytest.raises(DistStoreError):
            store.wait([key], timedelta(milliseconds=1))
    SignedStore(bare, "another secret", "run").set("theirs", "value")
    SignedStore(bare, "secret", "another run").set("earlier", "value")
    bare.set("run/earlier", bare.get("another run/earlier"))
    assert store.is_forged("theirs") and store.is_forged("earlier")
    reader, earlier = SignedStore(bare, "secret", "run"), bare.get("run/key")
    for value in (b"newer", b"newest"):  # the second is from another process, whose numbers must go on, not begin again
        SignedStore(bare, "secret", "run").set("key", value)
        assert reader.get("key") == value
        newer = bare.get("run/key")
        bare.set("run/key", earlier)
        assert not reader.check(["key"]) and reader.is_forged("key")
        bare.set("run/key", newer)
    bare.set("run/group/late", b"forged")
    threading.Timer(0.2, twin.set, ("late", "right")).start()
    assert store.with_prefix("group").get("late") == b"right" == twin.multi_get(["late"])[0]
    assert [store.add("counter", 2), store.add("counter", 1)] == [2, 3]


def test_store_without_a_secret_is_not_signed() -> None:
    bare: Store = HashStore()
    sign_store(bare, {}, "ranks").set("key", "value")
    assert bare.get("ranks/key") == b"value"
    sign_store(bare, {SECRET_VARIABLE: "word", "TORCHELASTIC_RUN_ID": "run"}, "ranks").set("key", "value")
    assert bare.get("run/ranks/key").endswith(b"value") and bare.get("run/ranks/key") != b"value"


def test_common_secret_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        secrets = list(pool.map(lambda _: common_secret({}, tmp_path), range(8)))
    assert len(set(secrets)) == 1 and len(secrets[0]) == 64
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600
    assert common_secret({SECRET_VARIABLE: "word of the job"}, tmp_path) == "word of the job"
    with pytest.raises(LaunchError, match=r"several nodes that share no run directory .* set .* ALIQUOT_SECRET"):
        common_secret({}, None)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / SECRET_FILE).symlink_to(tmp_path / SECRET_FILE)
    with pytest.raises(StorageError, match="cannot read the secret that all nodes share"):
        common_secret({}, tmp_path / "other")


@pytest.mark.parametrize(("key", "value"), [("missing", "pip install evil to go on"), ("1", "{evil")])
def test_nodes_ignore_unsigned_values_in_the_store(tmp_path: Path, key: str, value: str) -> None:
    """Neither a text that all would print, nor an entry in the name of a node."""
    port = free_port()
    with started([node(0, 2, port, 200, tmp_path)]) as (first,):
        while True:
            with suppress(DistError):
                stranger = TCPStore("127.0.0.1", int(port), None, False, timedelta(seconds=5), False)
                break
        while not (keys := [key for key in stranger.list_keys() if key.endswith("nodes/0")]):
            time.sleep(0.02)
        stranger.set(keys[0].removesuffix("0") + key, value)
        with started([node(1, 2, port, 200, tmp_path)]) as (second,):
            outputs = [process.communicate(timeout=240) for process in (first, second)]
            assert [first.returncode, second.returncode] == [0, 0], outputs
    assert outputs[0][0] == "[1, 1]\n" and "evil" not in str(outputs)


def meet(number: int, port: str, ranks: int) -> tuple[NodeGroup, int]:
    launch = LaunchSection(nodes=2, node_rank=number, master_port=int(port), ranks=ranks, join_timeout_s=20)
    return meet_nodes(launch, automatic=True, secret="of all starts")


def stranger_at(port: str) -> TCPStore:
    """A client of node 0's store, once node 0 has written its entry there."""
    while connection_failure("127.0.0.1", int(port)):
        time.sleep(0.02)
    stranger = TCPStore("127.0.0.1", int(port), None, False, timedelta(seconds=5), False)
    stranger.wait([ENTRY], timedelta(seconds=5))
    return stranger


@pytest.fixture
def recording() -> dict[str, bytes]:
    """All signed values of an earlier start of two nodes, with one rank each."""
    port = free_port()
    with ThreadPoolExecutor() as pool:
        groups = list(pool.map(meet, (0, 1), (port, port), (1, 1)))
        assert groups[0][0].run_id == groups[1][0].run_id
        stranger = stranger_at(port)
        return {key: stranger.get(key) for key in stranger.list_keys() if not key.endswith(("times", "left"))}


def test_entry_of_an_earlier_start_does_not_count(recording: dict[str, bytes]) -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, 0, port, 3)
        stranger = stranger_at(port)
        earlier, nonce = (
            re.findall(r"[0-9a-f]{64}", str(entry))[-1] for entry in (recording[ENTRY], stranger.get(ENTRY))
        )
        for key, value in recording.items():
            if not key.endswith("/0"):
                stranger.set(key, value)  # type: ignore[arg-type]
                stranger.set(key.replace(earlier, nonce), value)  # type: ignore[arg-type]
        second = pool.submit(meet, 1, port, 2)
        assert [first.result()[1], second.result()[1]] == [2, 2], "the smallest number of ranks of this start"


@pytest.mark.parametrize("number", [0, 1])
def test_node_ends_on_an_answer_of_an_earlier_start(number: int, recording: dict[str, bytes]) -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        if number:  # another program serves the store, and plays back all values
            server = TCPStore("127.0.0.1", int(port), None, True, timedelta(seconds=5), False)
            text = "the answer of node 0 is that of an earlier start: another program writes to the rendezvous store. "
        else:
            node = pool.submit(meet, 0, port, 1)
            server, recording = stranger_at(port), {ENTRY: recording[ENTRY]}
            text = "the entry of node 0 is not that of this start: another program"
        for key, value in recording.items():
            server.set(key, value)  # type: ignore[arg-type]
        with pytest.raises(RendezvousError, match=text):
            node.result() if number == 0 else meet(1, port, 1)


@pytest.mark.long
def test_nodes_without_a_common_secret_are_reported(tmp_path: Path) -> None:
    port = free_port()
    nodes = [node(own, 2, port, 3, tmp_path) for own in range(2)]
    nodes[1] = (nodes[1][0], environment(ALIQUOT_SECRET="another word"))
    first, second = last_lines(nodes)
    assert first.startswith("a message from node 1 is not signed with the secret of this run (ALIQUOT_SECRET, or")
    # Which of the two gives up first is not said.
    assert second.startswith(("a message from node 0 is not signed", "node 0 has ended before all")), second
