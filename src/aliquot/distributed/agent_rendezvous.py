"""The rendezvous of torch's elastic agent, by a store in which the launchers have met already.

torch's own handlers open a store that listens on every address, and `c10d` unpickles what lies in it.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from aliquot.distributed.rendezvous import NodeGroup

BACKEND = "aliquot"
_GROUP = "group"


class AgentRendezvous(RendezvousHandler):
    """Hand the agent the store of its group; the ranks meet in the same store."""

    def __init__(self, group: NodeGroup) -> None:
        self._group = group

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        group = self._group
        bootstrap = RendezvousStoreInfo(group.address, group.port)
        return RendezvousInfo(group.store.below("agents"), group.node, group.nodes, bootstrap)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._group.run_id

    def shutdown(self) -> bool:
        return True


def configuration(group: NodeGroup) -> dict[str, NodeGroup]:
    """Register the handler with torch, and return what LaunchConfig passes to it as `rdzv_configs`."""
    rendezvous_handler_registry.register(BACKEND, _create)
    return {_GROUP: group}


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return AgentRendezvous(parameters.config[_GROUP])
