"""The network: where gloo listens, names, ports, other nodes, EFA, NCCL."""

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
    """Interfaces that are up, and what GLOO_SOCKET_IFNAME makes of them."""
    status = psutil.net_if_stats()
    up = [name for name in sorted(status) if status[name].isup and address_of(name) != "no address"]
    found = ", ".join(f"{name} {address_of(name)}" for name in up) or "none is up"
    outside = [name for name in up if not address_of(name).startswith("127.")]
    told = subject.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if told and told not in up:
        meaning, fix = f"GLOO_SOCKET_IFNAME is {told}, which is not up: no rank can be joined", "unset or correct it"
        return Finding("interface", "network interface", "problem", found, meaning, fix)
    if told == "lo" and outside:
        meaning = "GLOO_SOCKET_IFNAME is lo: ranks of other nodes cannot reach this one"
        return Finding("interface", "network interface", "warning", found, meaning, "unset it for several nodes")
    if not outside:
        meaning, fix = "one machine only: there is no way to another", "bring an interface up for several nodes"
        return Finding("interface", "network interface", "warning", found, meaning, fix)
    meaning = f"GLOO_SOCKET_IFNAME says {told}" if told else "with several nodes the one that leads to node 0 is taken"
    return Finding("interface", "network interface", "ok", found, meaning)


def check_names(subject: Subject) -> Finding:
    """What this host's own name resolves to: gloo without an interface, and other tools, go by it."""
    name, fix = socket.gethostname(), "an entry in /etc/hosts or DNS with the address that other nodes use"
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError):  # the latter of more than 63 characters without a dot
        meaning = "aliquot does without; torchrun without --master-addr, DeepSpeed and NCCL may not"
        return Finding("names", "own name", "warning", f"{name} does not resolve", meaning, fix)
    found = f"{name} is {address}"
    if address.startswith("127."):
        meaning = "aliquot chooses the interface itself; gloo elsewhere would listen where no other node can reach it"
        return Finding("names", "own name", "warning", found, meaning, fix)
    if interface_towards(address) is None:
        meaning = "the name leads to another machine: gloo elsewhere would not find its own address"
        return Finding("names", "own name", "warning", found, meaning, fix)
    return Finding("names", "own name", "ok", found, "other programs find this machine, too")


def check_port(subject: Subject) -> Finding:
    """Whether the port where nodes meet is free here."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", subject.port))
        except OSError as error:
            meaning = "this machine cannot be node 0 of several; runs on one machine take a free port by themselves"
            fix = "set launch.master_port (MASTER_PORT) to a free one on all nodes, or end what holds it"
            return Finding("port", "port", "warning", f"{subject.port}: {error.strerror}", meaning, fix)
    return Finding("port", "port", "ok", f"{subject.port} is free", "nodes can meet here")


def check_peers(subject: Subject) -> Finding:
    """Whether each of `peers` answers. One that refuses the connection is reached: only nobody listens there yet.

    Raises UserError as `peers` does.
    """
    if not subject.peers:
        meaning = "name them by --peers HOST,HOST to try the way there"
        return Finding("peers", "other nodes", "ok", "none given", meaning)
    bad, good = [], []
    for host, port in peers(subject):
        try:
            with suppress(ConnectionRefusedError):
                socket.create_connection((host, port), timeout=_CONNECT_S).close()
            good.append(f"{host} by {interface_towards(host)}")
        except (socket.gaierror, UnicodeError):  # UnicodeError: it cannot be a name, as `a..b`
            bad.append(f"{host} does not resolve")
        except OSError as error:
            bad.append(f"{host}: {'no answer' if isinstance(error, TimeoutError) else error.strerror}")
    found = "; ".join([*bad, *(f"reached {name}" for name in good)])
    if bad:
        fix = "DNS or /etc/hosts; a security group that allows all traffic from itself; the same subnet or a route"
        return Finding("peers", "other nodes", "problem", found, "nodes that do not reach each other cannot train", fix)
    return Finding("peers", "other nodes", "ok", found, "the way to every other node is open")


def peers(subject: Subject) -> list[tuple[str, int]]:
    """Host and port of each. Raises UserError for one that is no address."""
    return [_host_and_port(peer, subject.port) for peer in subject.peers]


def _host_and_port(peer: str, port: int) -> tuple[str, int]:
    """Of HOST, HOST:PORT, [IPv6] or [IPv6]:PORT; `port` where it names none."""
    parts = _PEER.fullmatch(peer.strip())
    found = int(parts["port"] or port) if parts is not None else 0
    if parts is None or not 0 < found < 1 << 16:
        raise UsageError(f"--peers: {peer!r} is none of HOST, HOST:PORT and [IPv6]:PORT with a port from 1 to 65535")
    return parts["address"] or parts["name"], found


def check_efa(subject: Subject) -> Finding:
    """EFA devices of the machine, and whether this container was given them."""
    root = subject.root
    devices = [
        device.name
        for device in sorted((root / "sys/bus/pci/devices").glob("*"))
        if read_text(device / "vendor") == _AMAZON and (read_text(device / "device") or "").startswith(_EFA)
    ]
    if not devices:
        return Finding("efa", "EFA", "ok", "no EFA device", "ranks of several nodes talk through TCP")
    found = f"{len(devices)} EFA device{'s' if len(devices) > 1 else ''} ({', '.join(devices)})"
    if not any((root / "dev/infiniband").glob("uverbs*")):
        meaning = "the container was not given them: NCCL falls back to TCP"
        return Finding("efa", "EFA", "warning", found, meaning, "request vpc.amazonaws.com/efa in the pod")
    meaning = "NCCL can use them through aws-ofi-nccl; gloo, on CPU, uses TCP all the same"
    return Finding("efa", "EFA", "ok", found, meaning)


def check_nccl(subject: Subject) -> Finding:
    """GPUs that the machine has, that torch sees, and NCCL."""
    import torch

    devices = sorted((subject.root / "dev").glob("nvidia[0-9]*"))
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices and not seen:
        return Finding("nccl", "GPUs and NCCL", "ok", "no GPU", "training is on the CPU")
    if seen < len(devices):
        found = f"{len(devices)} GPUs, torch {torch.__version__} sees {seen}"
        fix = "a torch built for CUDA and a driver that is new enough; CUDA_VISIBLE_DEVICES"
        return Finding("nccl", "GPUs and NCCL", "problem", found, "GPUs stay unused", fix)
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Finding("nccl", "GPUs and NCCL", "ok", f"{seen} GPUs, NCCL {version}", "one rank a GPU, connected by NCCL")
