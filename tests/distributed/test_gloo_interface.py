"""Which interface leads where, and on which address a run listens."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import subprocess
import time

import psutil
import pytest

from aliquot.core.errors import LaunchError, RendezvousError, resource_error
from aliquot.distributed.gloo_interface import (
    address_here,
    address_of,
    check_network,
    group_address,
    interface_towards,
    listening_address,
)
from aliquot.distributed.rendezvous import single_node
from aliquot.distributed.store_server import allow_open_files, check_connection, connection_failure
from tests.tensor_io.world import run_world

OTHER = next((name for name in psutil.net_if_addrs() if name != "lo" and address_of(name) != "no address"), None)


def test_interface_towards_oneself() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no-such-host.invalid") is None


def test_listening_address_is_the_one_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert listening_address("127.0.0.1") == address_here("127.0.0.1") == "127.0.0.1"
    assert address_here("no-such-host.invalid") == "no-such-host.invalid"
    with pytest.raises(OSError, match="known"):
        listening_address("no-such-host.invalid")
    if OTHER is None:
        pytest.skip("this machine has loopback only")
    own = address_of(OTHER)
    assert listening_address(own) == own
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", OTHER)
    # A host's own name may resolve to loopback, where no other host reaches it; this one looks for it elsewhere, too.
    assert listening_address("127.0.1.1") == address_here("127.0.1.1") == own == group_address()
    assert listening_address("203.0.113.1") == own, "behind a translated address"
    group = single_node()
    assert group.address == own and connection_failure(group.address, group.port) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(RendezvousError, match="GLOO_SOCKET_IFNAME is eth77"):
        group_address()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace")
@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ([], "cannot reach itself: its loopback interface is down, or has no address"),
        (["link set lo up"], "127.0.0.1 127.0.0.1"),
        (
            [
                "link set lo up", "link add v0 type veth peer name v1", "link set v1 up", "link set v0 up",
                "address add fd00::1/64 dev v0 nodad", "address delete 127.0.0.1/8 dev lo",
            ],
            "fd00::1 ::1",
        ),
    ],
)  # fmt: skip
def test_address_of_a_node_without_ipv4_or_loopback(
    monkeypatch: pytest.MonkeyPatch, commands: list[str], expected: str
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # a run in this process may have set it

    def address(_: object) -> str:
        ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET
        for command in commands:
            subprocess.run(["ip", *command.split()], check=False)
        while not all(state.isup for name, state in psutil.net_if_stats().items() if name == "v0"):
            time.sleep(0.05)  # the kernel notices the carrier later
        return f"{group_address()} {single_node().address}"

    (answer,) = run_world(1, address)
    assert expected in str(answer)


def test_machine_that_no_rank_can_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:  # bound, but listening to nobody, as behind a loopback interface that is down
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(RendezvousError, match=r"cannot connect to that port: .* Is the interface up"):
            check_connection(*silent.getsockname())
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    with pytest.raises(LaunchError, match="has 64 characters: torch reads at most 63"):
        check_network()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    with pytest.raises(LaunchError, match="this process may open 24 files"):
        allow_open_files()
    error = OSError(errno.EMFILE, "Too many open files", "a-cache")
    assert "a-cache: too many open files: this process may open 24. Raise" in str(resource_error(error))
