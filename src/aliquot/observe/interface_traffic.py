"""What has gone through each network interface of this machine."""

from __future__ import annotations

from pathlib import Path


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
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        name, colon, counts = line.partition(":")
        if colon:
            words = counts.split()
            interfaces[name.strip()] = (int(words[0]), int(words[8]))
    return interfaces
