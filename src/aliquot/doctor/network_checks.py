"""Checks of the network: interface, host name, port, other nodes, EFA and NCCL."""

from __future__ import annotations

import re
import socket
from contextlib import suppress

import psutil

from aliquot.core.errors import UsageError
from aliquot.core.number_format import count_of
from aliquot.distributed.gloo_interface import address_of, interface_towards
from aliquot.doctor.finding import Case, Finding, Subject, check, conclude
from aliquot.machine.cgroup import read_text

_CONNECT_S = 5.0
_AMAZON, _EFA = "0x1d0f", "0xefa"
_PEER = re.compile(r"(?:\[(?P<address>[^][]+)]|(?P<name>[^][:]+))(?::(?P<port>[0-9]{1,5}))?")


@check("interface", "network interface")
def check_interface(subject: Subject) -> Finding:
    """Check the interfaces that are up, and the choice of GLOO_SOCKET_IFNAME."""
    status = psutil.net_if_stats()
    up = [name for name in sorted(status) if status[name].isup and address_of(name) != "no address"]
    outside = [name for name in up if not address_of(name).startswith("127.")]
    chosen = subject.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return conclude(
        ", ".join(f"{name} {address_of(name)}" for name in up) or "none is up",
        Case(
            chosen and chosen not in up,
            "problem",
            meaning=f"GLOO_SOCKET_IFNAME is {chosen}, which is not up: ranks cannot connect",
            fix="unset or correct it",
        ),
        Case(
            chosen == "lo" and outside,
            "warning",
            meaning="GLOO_SOCKET_IFNAME is lo: ranks of other nodes cannot reach this one",
            fix="for several nodes, unset it",
        ),
        Case(
            not outside,
            "warning",
            meaning="this machine cannot reach another",
            fix="for several nodes, bring an interface up",
        ),
        ok=f"GLOO_SOCKET_IFNAME says {chosen}" if chosen else "with several nodes the one to node 0 is taken",
    )


@check("names", "own name")
def check_names(subject: Subject) -> Finding:
    """Check the address to which the host name resolves. Other tools use it, and so does gloo without an interface."""
    name, fix = socket.gethostname(), "an entry in /etc/hosts or DNS with the address that other nodes use"
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError):  # UnicodeError: more than 63 characters without a dot
        return Finding(
            "warning",
            f"{name} does not resolve",
            meaning="aliquot does not need the name; torchrun without --master-addr, DeepSpeed and NCCL may",
            fix=fix,
        )
    return conclude(
        f"{name} is {address}",
        Case(
            address.startswith("127."),
            "warning",
            meaning="aliquot chooses the interface itself; gloo elsewhere would listen where no other node can reach"
            " it",
            fix=fix,
        ),
        Case(
            interface_towards(address) is None,
            "warning",
            meaning="the name leads to another machine: gloo elsewhere would not find its own address",
            fix=fix,
        ),
        ok="other programs find this machine by its name",
    )


@check("port", "port")
def check_port(subject: Subject) -> Finding:
    """Check that the rendezvous port is free on this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", subject.port))
        except OSError as error:
            return Finding(
                "warning",
                f"{subject.port}: {error.strerror}",
                meaning="this machine cannot be node 0 of several; runs on one machine choose a free port",
                fix="set launch.master_port (MASTER_PORT) to a free one on all nodes, or end the process that uses it",
            )
    return Finding("ok", f"{subject.port} is free", meaning="nodes can meet here")


@check("peers", "other nodes")
def check_peers(subject: Subject) -> Finding:
    """Check that the other nodes answer. A refused connection is an answer, because no rank listens there yet."""
    bad, good = [], []
    for host, port in parse_peers(subject):
        try:
            with suppress(ConnectionRefusedError):
                socket.create_connection((host, port), timeout=_CONNECT_S).close()
            good.append(f"{host} by {interface_towards(host)}")
        except (socket.gaierror, UnicodeError):  # UnicodeError: an impossible name, such as `a..b`
            bad.append(f"{host} does not resolve")
        except OSError as error:
            bad.append(f"{host}: {'no answer' if isinstance(error, TimeoutError) else error.strerror}")
    return conclude(
        "; ".join([*bad, *(f"reached {name}" for name in good)]) or "none given",
        Case(
            bad,
            "problem",
            meaning="nodes that do not reach each other cannot train",
            fix="DNS or /etc/hosts; a security group that allows all traffic from itself; the same subnet or a route",
        ),
        ok="every other node is reachable" if good else "--peers HOST,HOST tests connections to other nodes",
    )


def parse_peers(subject: Subject) -> list[tuple[str, int]]:
    """Return host and port of every HOST, HOST:PORT, [IPv6] or [IPv6]:PORT. Raises UsageError for an invalid peer."""
    addresses = []
    for peer in subject.peers:
        parts = _PEER.fullmatch(peer.strip())
        port = int(parts["port"] or subject.port) if parts is not None else 0
        if parts is None or not 0 < port < 1 << 16:
            raise UsageError(
                f"--peers: {peer!r} is none of HOST, HOST:PORT and [IPv6]:PORT with a port from 1 to 65535"
            )
        addresses.append((parts["address"] or parts["name"], port))
    return addresses


@check("efa", "EFA")
def check_efa(subject: Subject) -> Finding:
    """Check that the container can use the EFA devices of the machine."""
    devices = [
        device.name
        for device in sorted((subject.root / "sys/bus/pci/devices").glob("*"))
        if read_text(device / "vendor") == _AMAZON and (read_text(device / "device") or "").startswith(_EFA)
    ]
    return conclude(
        f"{count_of(len(devices), 'EFA device')} ({', '.join(devices)})",
        Case(not devices, "ok", state="no EFA device", meaning="ranks of several nodes talk through TCP"),
        Case(
            not any((subject.root / "dev/infiniband").glob("uverbs*")),
            "warning",
            meaning="the container has no access to them: NCCL falls back to TCP",
            fix="request vpc.amazonaws.com/efa in the pod",
        ),
        ok="NCCL can use them through aws-ofi-nccl; gloo, on CPU, always uses TCP",
    )


@check("nccl", "GPUs and NCCL")
def check_nccl(subject: Subject) -> Finding:
    """Compare the GPUs of the machine with those that torch sees, and report NCCL."""
    import torch

    devices = sorted((subject.root / "dev").glob("nvidia[0-9]*"))
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices and not seen:
        return Finding("ok", "no GPU", meaning="training is on the CPU")
    if seen < len(devices):
        return Finding(
            "problem",
            f"{count_of(len(devices), 'GPU')}, torch {torch.__version__} sees {seen}",
            meaning="GPUs stay unused",
            fix="a torch built for CUDA and a driver that is new enough; CUDA_VISIBLE_DEVICES",
        )
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Finding("ok", f"{count_of(seen, 'GPU')}, NCCL {version}", meaning="one rank per GPU, connected by NCCL")
