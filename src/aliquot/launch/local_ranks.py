"""Which ranks share this host, where whoever started them (a loop, srun) has told their numbers only.

They tell each other which host they are on, by the store in which they meet afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from aliquot.launch.placement import number
from aliquot.launch.rendezvous import meet_hosts


@contextmanager
def told_local_ranks(environ: MutableMapping[str, str], timeout_s: float) -> Iterator[None]:
    """Complete `environ` as torchrun would have. Ranks must join within the block, which keeps the store open.

    Collective where `environ` names one rank of many and not its place on its host. Raises UserError.
    """
    of_many = "RANK" in environ and number(environ, "WORLD_SIZE", 1) > 1
    if not of_many or ("LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" in environ):
        yield
        return
    rank = number(environ, "RANK", 0)
    store, hosts = meet_hosts(rank, number(environ, "WORLD_SIZE", 1), environ, timeout_s)
    local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    order = list(dict.fromkeys(hosts))
    environ["LOCAL_RANK"] = str(local.index(rank))
    environ["LOCAL_WORLD_SIZE"] = str(len(local))
    environ["GROUP_RANK"] = str(order.index(hosts[rank]))
    environ["GROUP_WORLD_SIZE"] = str(len(order))
    yield
    del store
