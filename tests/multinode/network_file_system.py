"""A directory of this machine as a file system of the network, which hosts reach only while their cables are in.

GlusterFS, from Debian's glusterfs-server: a server where the switch is and a client, with caches of its own, on each
host. The directory has the same path everywhere; who is on no host sees the server's side of it.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.multinode.namespaces import Host, kill

_PORT = 24999
_SERVER = """
volume files
  type storage/posix
  option directory {directory}
end-volume
volume locked
  type features/locks
  subvolumes files
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address {address}
  option transport.socket.listen-port {port}
  option auth.addr.locked.allow *
  subvolumes locked
end-volume
"""
# A client waits for a server that does not answer, as a hard mount of NFS does.
_CLIENT = """
volume client
  type protocol/client
  option transport-type tcp
  option remote-host {address}
  option remote-port {port}
  option remote-subvolume locked
  option ping-timeout 0
end-volume
volume behind
  type performance/write-behind
  subvolumes client
end-volume
volume cached
  type performance/io-cache
  subvolumes behind
end-volume
"""


def why_not() -> str | None:
    return (
        None if shutil.which("glusterfsd") and Path("/dev/fuse").exists() else "a network file system needs glusterfs"
    )


@contextmanager
def served(directory: Path, switch: Host) -> Iterator[list[str]]:
    """What a command on a host begins with, to have `directory` mounted; what is started so sees no other host's cache.

    `switch.address` is where the server listens.
    """
    at = {"directory": directory, "address": switch.address, "port": _PORT}
    folder = directory.with_name(f"{directory.name}-server")
    folder.mkdir()
    for name, text in (("server", _SERVER), ("client", _CLIENT)):
        (folder / f"{name}.vol").write_text(text.format(**at))
    command = ["glusterfsd", "-N", "-f", str(folder / "server.vol"), "-l", str(folder / "server.log")]
    server = subprocess.Popen(switch.command(*command))
    mount = f"glusterfs -f {folder}/client.vol -l {folder}/client-$$.log {directory}"
    try:
        _wait(folder / "server.log", server)
        # In the mount namespace that `ip netns exec` makes for each command.
        yield ["sh", "-c", f'{mount} && exec "$@"', "sh"]
    finally:
        with suppress(subprocess.CalledProcessError):
            kill(switch)
        server.wait(10)


def _wait(log: Path, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end and server.poll() is None:
        if log.exists() and "Final graph" in log.read_text(errors="replace"):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the file system's server did not start: {log}")
