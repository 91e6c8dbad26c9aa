"""Which network interface and address a run listens on, and which one leads to another machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator

import psutil

from aliquot.core.errors import RendezvousError
from aliquot.distributed.topology import Topology

_ANYWHERE = "192.0.2.1"  # an address for documentation: packets to it would take the default route


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
    return _interface_of(own)


def _interface_of(address: str) -> str | None:
    """The interface of this machine that has `address`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return None


def listening_address(master: str) -> str:
    """Return the one address on which the first process of a group listens, if the others know it as `master`.

    That is `master` itself if this machine has that address. The machine's own name often resolves to loopback, and
    behind a translated address the machine has another one: then it is the address of the group's interface. Raises
    OSError if `master` does not resolve.
    """
    address = str(socket.getaddrinfo(master, 1, type=socket.SOCK_STREAM)[0][4][0])
    chosen = gloo_interface()
    if _is_loopback(address):
        return address if chosen is None else address_of(chosen)
    return address if _interface_of(address) is not None else address_of(chosen or interface_towards(master))


def address_here(master: str) -> str:
    """Return the address by which this machine reaches `master`: its own name may resolve to loopback, where the first
    process of a group does not listen if others reach it elsewhere."""
    try:
        own = _is_loopback(str(socket.getaddrinfo(master, 1, type=socket.SOCK_STREAM)[0][4][0]))
    except OSError:
        return master
    return listening_address(master) if own else master


def group_address() -> str:
    """Return the address at which nodes reach this one before they know each other: of gloo's interface, else of the
    interface with the default route, else of the first one that is up.

    Raises UserError.
    """
    check_interface()
    interface = gloo_interface() or interface_towards(_ANYWHERE) or next(_others_that_are_up(), None)
    return "127.0.0.1" if interface is None else address_of(interface)


def _others_that_are_up() -> Iterator[str]:
    addresses = psutil.net_if_addrs()
    for name, state in psutil.net_if_stats().items():
        if state.isup and name != "lo" and any(entry.family == socket.AF_INET for entry in addresses.get(name, [])):
            yield name


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def gloo_interface() -> str | None:
    """The interface that gloo is told to use, or the first of several."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None


def choose_interface(topology: Topology) -> None:
    """Have gloo and NCCL, which authenticate nobody, listen on the group's interface only, unless the person says
    otherwise; on one node that is loopback, which needs no resolvable host name."""
    interface = "lo" if topology.nodes == 1 else interface_towards(os.environ["MASTER_ADDR"])
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


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
