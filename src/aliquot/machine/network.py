"""Which network interface leads to another machine, and what has gone through each."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

from aliquot.errors import RendezvousError


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


def gloo_interface() -> str | None:
    """The interface that gloo is told to use, or the first of several."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None


def check_interface() -> None:
    """Raises UserError where GLOO_SOCKET_IFNAME names an interface that this machine has not."""
    name, known = gloo_interface(), sorted(psutil.net_if_addrs())
    if name is not None and name not in known:
        raise RendezvousError(
            f"GLOO_SOCKET_IFNAME is {name}, but the interfaces of this machine are {', '.join(known)}"
        )


def address_of(interface: str | None) -> str:
    """Its IPv4 address, else IPv6; without an interface that of this host's name, as gloo has it."""
    if interface is None:
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError:
            return "no address"
    addresses = sorted(
        (entry.family != socket.AF_INET, entry.address.partition("%")[0])
        for entry in psutil.net_if_addrs().get(interface, [])
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )
    return addresses[0][1] if addresses else "no address"


class InterfaceTraffic:
    """Bytes through each network interface of this machine since this was made, whoever sent them."""

    def __init__(self, file: Path = Path("/proc/net/dev")) -> None:
        self._file = file
        self._start = read_interfaces(file)

    def readings(self) -> dict[str, dict[str, dict[str, int]]]:
        """As a metric; interfaces that nothing went through are left out."""
        moved = {}
        for name, (received, sent) in read_interfaces(self._file).items():
            before = self._start.get(name, (0, 0))
            since = {"received": received - before[0], "sent": sent - before[1]}
            if any(since.values()):
                moved[name] = since
        return {"interface_bytes": moved}


def read_interfaces(file: Path = Path("/proc/net/dev")) -> dict[str, tuple[int, int]]:
    """Bytes received and sent by each interface since it came up; empty where the kernel does not tell."""
    interfaces = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        name, colon, counts = line.partition(":")
        if colon:
            words = counts.split()
            interfaces[name.strip()] = (int(words[0]), int(words[8]))
    return interfaces
