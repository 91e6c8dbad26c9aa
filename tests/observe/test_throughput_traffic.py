"""Bytes through network interfaces: from a file of the kernel's form, and on this machine."""

from __future__ import annotations

import socket
from pathlib import Path

from aliquot.observe.throughput import InterfaceTraffic


def test_traffic_is_since_the_start_and_of_those_that_moved(tmp_path: Path) -> None:
    def write(*rows: tuple[str, int, int]) -> None:
        lines = ["Inter-|   Receive", " face |bytes packets"]
        lines += [f"{name}: {got} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0" for name, got, sent in rows]
        (tmp_path / "dev").write_text("\n".join(lines) + "\n")

    write(("    lo", 100, 100), ("  eth0", 5, 7), (" eth1", 1, 1))
    traffic = InterfaceTraffic(tmp_path / "dev")
    assert traffic.readings() == {"interface_bytes": {}}
    write(("    lo", 350, 350), ("  eth0", 5, 9), (" eth1", 1, 1), ("new", 3, 0))
    assert traffic.readings() == {
        "interface_bytes": {
            "lo": {"received": 250, "sent": 250},
            "eth0": {"received": 0, "sent": 2},
            "new": {"received": 3, "sent": 0},
        }
    }
    assert InterfaceTraffic(tmp_path / "absent").readings() == {"interface_bytes": {}}


def test_what_this_process_sends_to_itself_is_seen_on_lo() -> None:
    traffic = InterfaceTraffic()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            client.sendall(b"x" * 50_000)
            while len(connection.recv(50_000, socket.MSG_PEEK)) < 50_000:
                pass
    assert traffic.readings()["interface_bytes"]["lo"]["sent"] >= 50_000
