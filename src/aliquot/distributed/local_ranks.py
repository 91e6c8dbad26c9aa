"""Which ranks share this host, where whoever started them (a loop, srun) has not told it, or not all of it.

They tell each other which host they are on, by the store in which they meet afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from aliquot.distributed.rendezvous import meet_hosts
from aliquot.distributed.topology import number

_PLACE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@contextmanager
def told_local_ranks(environ: MutableMapping[str, str], timeout_s: float) -> Iterator[bool]:
    """Complete `environ` as torchrun would have. Ranks must join within the block, which keeps the store open.

    Yields whether each rank of this host has been bound to cores of its own, as srun does. Collective where `environ`
    names one rank of many and not its place on its host, or not which of the hosts that is. Raises UserError.
    """
    if _is_told(environ):
        yield False
        return
    rank = number(environ, "RANK", 0)
    store, told = meet_hosts(rank, number(environ, "WORLD_SIZE", 1), environ, timeout_s)
    hosts = [each["identity"] for each in told]
    local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    order = list(dict.fromkeys(hosts))
    environ["LOCAL_RANK"] = str(local.index(rank))
    environ["LOCAL_WORLD_SIZE"] = str(len(local))
    environ["GROUP_RANK"] = str(order.index(hosts[rank]))
    environ["GROUP_WORLD_SIZE"] = str(len(order))
    bound = [cpu for other in local for cpu in told[other]["cpus"]]
    yield len(local) > 1 and len(set(bound)) == len(bound)
    del store


def _is_told(environ: Mapping[str, str]) -> bool:
    world_size = number(environ, "WORLD_SIZE", 1) if "RANK" in environ else 1
    if world_size == 1 or all(name in environ for name in _PLACE):
        return True
    # Of one host there is no more to be told.
    return all(name in environ for name in _PLACE[:2]) and number(environ, "LOCAL_WORLD_SIZE", 1) == world_size
