"""Which network interface gloo listens on, and which one leads to another machine."""

from __future__ import annotations

import os
import socket

import psutil

from aliquot.errors import RendezvousError
from aliquot.launch.topology import Topology


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


def choose_interface(topology: Topology) -> None:
    """Tell gloo where to listen, unless GLOO_SOCKET_IFNAME does; on one node that needs no resolvable host name."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interface = "lo" if topology.nodes == 1 else interface_towards(os.environ["MASTER_ADDR"])
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


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
