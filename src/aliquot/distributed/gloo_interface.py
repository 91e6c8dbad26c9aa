"""The network interface and address that a run listens on, and the interface that leads to another machine."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from aliquot.core.errors import LaunchError, RendezvousError
from aliquot.distributed.topology import Topology

_LONGEST_HOST_NAME = 63  # gloo and the resolver fail with the 64 characters that Linux allows
_ANYWHERE = ("192.0.2.1", "2001:db8::1")  # addresses reserved for documentation, used to find the default route
_NO_ADDRESS = "no address"
_LINK_LOCAL = "fe80:"  # the beginning of addresses that say nothing without an interface


def interface_towards(address: str) -> str | None:
    """Return the interface through which this machine sends packets to `address`; None if it does not resolve.

    For an address of this machine, the result is the interface that has the address. By default gloo would resolve the
    host name, which often gives a loopback address that no peer can reach.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # connecting a UDP socket chooses the route and sends nothing
            source = probe.getsockname()[0]
    except OSError:
        return None
    return _interface_of(source)


def _interface_of(address: str) -> str | None:
    """Return the interface of this machine that has `address`, or None."""
    entries = ((name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries)
    return next((name for name, entry in entries if entry.address.partition("%")[0] == address), None)


def listening_address(master: str) -> str:
    """Return the address that the server of a group listens on; other processes know the server as `master`.

    The result is the address of `master` if this machine has that address. Otherwise the result is the address of the
    group's interface, because `master` may resolve to loopback or to a NAT address of another machine. Without a chosen
    interface, loopback is the address of `lo`, which is ::1 on a machine without IPv4. Raises OSError if `master` does
    not resolve.
    """
    address = _resolve(master)
    chosen = gloo_interface()
    if _is_loopback(address):
        return address_of(chosen or "lo")
    return address if _interface_of(address) is not None else address_of(chosen or interface_towards(master))


def address_here(master: str) -> str:
    """Return the address by which this machine reaches the server `master`.

    If `master` is this machine, its name may resolve to loopback, although the server listens on another address.
    """
    try:
        is_local = _is_loopback(_resolve(master))
    except OSError:
        return master
    return listening_address(master) if is_local else master


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on `address` only. Port 0 takes a free port. Raises OSError."""
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def group_address() -> str:
    """Return the address at which other nodes, whose addresses are not known yet, can reach this node.

    The address belongs to the interface in GLOO_SOCKET_IFNAME if set, otherwise to the interface of the default route,
    otherwise to the first interface that is up.
    """
    check_network()
    candidates = [gloo_interface(), *map(interface_towards, _ANYWHERE), *active_interfaces(), "lo"]
    return address_of(next(name for name in candidates if name is not None))


def active_interfaces() -> list[str]:
    """Return the interfaces that are up and that other machines may reach at an IPv4 or IPv6 address."""
    up = (name for name, state in psutil.net_if_stats().items() if state.isup)
    return [name for name in up if not address_of(name).startswith(("127.", "::1", _LINK_LOCAL, _NO_ADDRESS))]


def _resolve(name: str) -> str:
    return str(socket.getaddrinfo(name, 1, type=socket.SOCK_STREAM)[0][4][0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def gloo_interface() -> str | None:
    """Return the (first) interface in GLOO_SOCKET_IFNAME, or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None


def choose_interface(topology: Topology) -> None:
    """Let gloo and NCCL listen only on the group's interface, because neither authenticates its peers.

    On a single node, the group's interface is loopback, which needs no resolvable host name. Environment variables that
    the user has set are kept.
    """
    interface = "lo" if topology.nodes == 1 else interface_towards(os.environ["MASTER_ADDR"])
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def check_network() -> None:
    """Raise an error if gloo cannot run here.

    The reason is a host name that gloo cannot read, no loopback, or an interface without an address in
    GLOO_SOCKET_IFNAME.
    """
    if len(host := socket.gethostname()) > _LONGEST_HOST_NAME:
        raise LaunchError(
            f"the name of this host, {host}, has {len(host)} characters: torch reads at most {_LONGEST_HOST_NAME}. Give"
            " the machine or the container a shorter name"
        )
    if interface_towards(address_of("lo")) is None:
        raise LaunchError(
            "this machine cannot reach itself: its loopback interface is down, or has no address. Bring up the"
            " interface (ip link set lo up; ip address add 127.0.0.1/8 dev lo)"
        )
    name = gloo_interface()
    if name is not None and address_of(name) == _NO_ADDRESS:
        usable = ", ".join(known for known in sorted(psutil.net_if_addrs()) if address_of(known) != _NO_ADDRESS)
        raise RendezvousError(
            f"GLOO_SOCKET_IFNAME is {name}, but the interfaces of this machine with an address are {usable}"
        )


def address_of(interface: str | None) -> str:
    """Return the IPv4 address of `interface`, or the IPv6 address of an interface without IPv4.

    For None, return the address of the host name, which gloo uses by default.
    """
    if interface is None:
        try:
            return _resolve(socket.gethostname())
        except OSError:
            return _NO_ADDRESS
    addresses = sorted(
        (entry.family != socket.AF_INET, entry.address.partition("%")[0])
        for entry in psutil.net_if_addrs().get(interface, [])
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )
    return addresses[0][1] if addresses else _NO_ADDRESS
