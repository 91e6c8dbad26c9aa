"""Checks of the network: interface, host name, port, other nodes, EFA and NCCL."""

from __future__ import annotations

import re
import socket
from contextlib import suppress

import psutil

from aliquot.core.errors import UsageError
from aliquot.distributed.gloo_interface import address_of, interface_towards
from aliquot.doctor.finding import Finding, Subject
from aliquot.machine.cgroup import read_text

_CONNECT_S = 5.0
_AMAZON, _EFA = "0x1d0f", "0xefa"
_PEER = re.compile(r"(?:\[(?P<address>[^][]+)]|(?P<name>[^][:]+))(?::(?P<port>[0-9]{1,5}))?")


def check_interface(subject: Subject) -> Finding:
    """Check the interfaces that are up, and the choice of GLOO_SOCKET_IFNAME."""
    status = psutil.net_if_stats()
    up = [name for name in sorted(status) if status[name].isup and address_of(name) != "no address"]
    observed = ", ".join(f"{name} {address_of(name)}" for name in up) or "none is up"
    outside = [name for name in up if not address_of(name).startswith("127.")]
    chosen = subject.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if chosen and chosen not in up:
        meaning, fix = f"GLOO_SOCKET_IFNAME is {chosen}, which is not up: ranks cannot connect", "unset or correct it"
        return Finding("interface", "network interface", "problem", observed, meaning, fix)
    if chosen == "lo" and outside:
        meaning = "GLOO_SOCKET_IFNAME is lo: ranks of other nodes cannot reach this one"
        return Finding("interface", "network interface", "warning", observed, meaning, "for several nodes, unset it")
    if not outside:
        meaning, fix = "this machine cannot reach another", "for several nodes, bring an interface up"
        return Finding("interface", "network interface", "warning", observed, meaning, fix)
    meaning = (
        f"GLOO_SOCKET_IFNAME says {chosen}" if chosen else "with several nodes the one that leads to node 0 is taken"
    )
    return Finding("interface", "network interface", "ok", observed, meaning)


def check_names(subject: Subject) -> Finding:
    """Check the address of the host's own name, which other tools use, and gloo without an interface."""
    name, fix = socket.gethostname(), "an entry in /etc/hosts or DNS with the address that other nodes use"
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError):  # UnicodeError: more than 63 characters without a dot
        meaning = "aliquot does not need the name; torchrun without --master-addr, DeepSpeed and NCCL may"
        return Finding("names", "own name", "warning", f"{name} does not resolve", meaning, fix)
    observed = f"{name} is {address}"
    if address.startswith("127."):
        meaning = "aliquot chooses the interface itself; gloo elsewhere would listen where no other node can reach it"
        return Finding("names", "own name", "warning", observed, meaning, fix)
    if interface_towards(address) is None:
        meaning = "the name leads to another machine: gloo elsewhere would not find its own address"
        return Finding("names", "own name", "warning", observed, meaning, fix)
    return Finding("names", "own name", "ok", observed, "other programs find this machine by its name")


def check_port(subject: Subject) -> Finding:
    """Check that the port of the rendezvous is free on this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", subject.port))
        except OSError as error:
            meaning = "this machine cannot be node 0 of several; runs on one machine choose a free port"
            fix = "set launch.master_port (MASTER_PORT) to a free one on all nodes, or end the process that uses it"
            return Finding("port", "port", "warning", f"{subject.port}: {error.strerror}", meaning, fix)
    return Finding("port", "port", "ok", f"{subject.port} is free", "nodes can meet here")


def check_peers(subject: Subject) -> Finding:
    """Check that the other nodes answer. A refused connection counts as an answer: nobody listens there yet.

    Raises:
        UsageError: an address is invalid.
    """
    if not subject.peers:
        meaning = "--peers HOST,HOST tests connections to other nodes"
        return Finding("peers", "other nodes", "ok", "none given", meaning)
    bad, good = [], []
    for host, port in parse_peers(subject):
        try:
            with suppress(ConnectionRefusedError):
                socket.create_connection((host, port), timeout=_CONNECT_S).close()
            good.append(f"{host} by {interface_towards(host)}")
        except (socket.gaierror, UnicodeError):  # UnicodeError: it cannot be a name, as `a..b`
            bad.append(f"{host} does not resolve")
        except OSError as error:
            bad.append(f"{host}: {'no answer' if isinstance(error, TimeoutError) else error.strerror}")
    observed = "; ".join([*bad, *(f"reached {name}" for name in good)])
    if bad:
        fix = "DNS or /etc/hosts; a security group that allows all traffic from itself; the same subnet or a route"
        return Finding(
            "peers", "other nodes", "problem", observed, "nodes that do not reach each other cannot train", fix
        )
    return Finding("peers", "other nodes", "ok", observed, "every other node is reachable")


def parse_peers(subject: Subject) -> list[tuple[str, int]]:
    """Return host and port of every peer. Raises UsageError for an invalid address."""
    return [_host_and_port(peer, subject.port) for peer in subject.peers]


def _host_and_port(peer: str, port: int) -> tuple[str, int]:
    """Parse HOST, HOST:PORT, [IPv6] or [IPv6]:PORT; `port` is the default."""
    parts = _PEER.fullmatch(peer.strip())
    number = int(parts["port"] or port) if parts is not None else 0
    if parts is None or not 0 < number < 1 << 16:
        raise UsageError(f"--peers: {peer!r} is none of HOST, HOST:PORT and [IPv6]:PORT with a port from 1 to 65535")
    return parts["address"] or parts["name"], number


def check_efa(subject: Subject) -> Finding:
    """Check that the container can use the EFA devices of the machine."""
    root = subject.root
    devices = [
        device.name
        for device in sorted((root / "sys/bus/pci/devices").glob("*"))
        if read_text(device / "vendor") == _AMAZON and (read_text(device / "device") or "").startswith(_EFA)
    ]
    if not devices:
        return Finding("efa", "EFA", "ok", "no EFA device", "ranks of several nodes talk through TCP")
    observed = f"{len(devices)} EFA device{'s' if len(devices) > 1 else ''} ({', '.join(devices)})"
    if not any((root / "dev/infiniband").glob("uverbs*")):
        meaning = "the container has no access to them: NCCL falls back to TCP"
        return Finding("efa", "EFA", "warning", observed, meaning, "request vpc.amazonaws.com/efa in the pod")
    meaning = "NCCL can use them through aws-ofi-nccl; gloo, on CPU, always uses TCP"
    return Finding("efa", "EFA", "ok", observed, meaning)


def check_nccl(subject: Subject) -> Finding:
    """Compare the GPUs of the machine with those that torch sees, and report NCCL."""
    import torch

    devices = sorted((subject.root / "dev").glob("nvidia[0-9]*"))
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices and not seen:
        return Finding("nccl", "GPUs and NCCL", "ok", "no GPU", "training is on the CPU")
    if seen < len(devices):
        observed = f"{len(devices)} GPUs, torch {torch.__version__} sees {seen}"
        fix = "a torch built for CUDA and a driver that is new enough; CUDA_VISIBLE_DEVICES"
        return Finding("nccl", "GPUs and NCCL", "problem", observed, "GPUs stay unused", fix)
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Finding("nccl", "GPUs and NCCL", "ok", f"{seen} GPUs, NCCL {version}", "one rank per GPU, connected by NCCL")
