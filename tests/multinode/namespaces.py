"""Hosts made of network namespaces of this machine, joined by a virtual cable. Needs root and iproute2."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "aliquot0"  # in each of them


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def sent_bytes(self) -> int:
        text = subprocess.run(self.command("cat", "/proc/net/dev"), capture_output=True, text=True, check=True).stdout
        line = next(line for line in text.splitlines() if line.strip().startswith(INTERFACE))
        return int(line.partition(":")[2].split()[8])


def why_not() -> str | None:
    """What keeps this machine from making namespaces; None: nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    name = f"aliquot-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip()}"


@contextmanager
def switched_hosts(count: int, rate: str | None = None, network: str = "10.77.0.") -> Iterator[list[Host]]:
    """Joined by a switch, which is one more namespace.

    `rate`: of each host's link, in both directions. `network`: `fd77::` makes hosts without IPv4.
    """
    mark = secrets.token_hex(3)
    hosts = [Host(f"aliquot-{mark}-{number}", f"{network}{number + 1}") for number in range(count)]
    switch = switch_of(hosts[0])
    try:
        for host in (switch, *hosts):
            _run("ip", "netns", "add", host.namespace)
        _run(*switch.command("ip", "link", "add", "bridge", "type", "bridge"))
        _run(*switch.command("ip", "addr", "add", f"{switch.address}/24", "dev", "bridge"))
        _run(*switch.command("ip", "link", "set", "bridge", "up"))
        for number, host in enumerate(hosts):
            port = f"port{number}"
            _run(
                "ip", "link", "add", INTERFACE, "netns", host.namespace,
                "type", "veth", "peer", "name", port, "netns", switch.namespace,
            )  # fmt: skip
            _run(*switch.command("ip", "link", "set", port, "master", "bridge", "up"))
            _run(*host.command("ip", "link", "set", INTERFACE, "up"))
            _run(*host.command("ip", "link", "set", "lo", "up"))
            if ":" in network:
                _run(*host.command("ip", "addr", "add", f"{host.address}/64", "dev", INTERFACE, "nodad"))
                _run(*host.command("ip", "addr", "del", "127.0.0.1/8", "dev", "lo"))
            else:
                _run(*host.command("ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE))
            if rate is not None:
                _limit(host, INTERFACE, rate)
                _limit(switch, port, rate)
        yield hosts
    finally:
        for host in (*hosts, switch):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", host.namespace)


def switch_of(host: Host) -> Host:
    """Of one of `switched_hosts`."""
    before, _, _ = host.namespace.rpartition("-")
    return Host(f"{before}-switch", "10.77.0.254")


def plug(host: Host, connected: bool) -> None:
    """The cable of one of `switched_hosts`, at the switch: the host's own end stays up, as a host's does."""
    state = "up" if connected else "down"
    _run("ip", "-n", switch_of(host).namespace, "link", "set", _port(host), state)


def lift_limit(host: Host) -> None:
    """Of one of `switched_hosts`, in both directions."""
    for namespace, device in ((host.namespace, INTERFACE), (switch_of(host).namespace, _port(host))):
        _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")


def kill(host: Host) -> None:
    """All of its processes at once, as when it loses its power."""
    found = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True)
    for process in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _port(host: Host) -> str:
    """Of the switch."""
    return f"port{host.namespace.rpartition('-')[2]}"


def _limit(host: Host, interface: str, rate: str) -> None:
    limit = ("tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
    _run(*host.command("tc", "qdisc", "add", "dev", interface, "root", *limit))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
