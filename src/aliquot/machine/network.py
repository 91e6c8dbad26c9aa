"""Which network interface leads to another machine."""

from __future__ import annotations

import socket

import psutil


def interface_towards(address: str) -> str | None:
    """Name of the interface that packets to `address` leave through, or None where the address does not resolve.

    A host's own name often resolves to a loopback address, and gloo would then listen where no peer can reach it.
    For an address of this machine itself the answer is the interface that holds it.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # UDP: chooses the route, sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return name
    return None
