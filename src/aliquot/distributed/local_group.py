"""Run the ranks of one node under torch's elastic agent until all ranks have ended, and return how they ended."""

from __future__ import annotations

import logging
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError as ElasticRendezvousError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from aliquot.core.errors import RendezvousError
from aliquot.core.python_command import python_command
from aliquot.distributed.forked_rank import end_forked_ranks, fork_server_errors, run_forked_rank
from aliquot.distributed.gloo_interface import check_network
from aliquot.distributed.leader_lease import ROUND
from aliquot.distributed.rank_errors import ERROR_LOG, Ended, ErrorLog, explain_failure, explain_stop
from aliquot.distributed.rendezvous import NodeGroup
from aliquot.distributed.run_secret import SECRET_VARIABLE
from aliquot.distributed.signals import STOP_SIGNALS

_BACKEND = "aliquot"
_GROUP = "group"


@dataclass(frozen=True)
class RankProgram:
    """The Python program that every local rank runs."""

    argv: list[str]  # arguments of the Python interpreter
    log_directory: Path
    grace_s: float  # time to save after a stop signal, before the rank is killed
    modules: tuple[str, ...] = ()  # modules that the fork server of elastic ranks imports once


def run_local_ranks(ranks: int, group: NodeGroup, program: RankProgram, round: int | None = None) -> Ended:
    """Run the program as the local `ranks` of a node of `group`, and wait for them. When a rank dies, all ranks end.

    The ranks of an elastic `round` are forked from the fork server (forked_rank.py). Without a round, every rank starts
    a new interpreter. Raises LaunchError for an unusable host name, RendezvousError if the nodes cannot
    join, and TrainingError if the fork server has ended.
    """
    check_network()
    # Silence torch's launcher, because aliquot reports the failures itself.
    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False

    config = LaunchConfig(
        min_nodes=group.nodes,
        max_nodes=group.nodes,
        nproc_per_node=ranks,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # rank_process redirects output; the agent writes nothing
        run_id=group.run_id,
        rdzv_backend=_BACKEND,
        rdzv_configs={_GROUP: group},
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        shutdown_timeout=math.ceil(program.grace_s) + 10,  # then the agent kills ranks, which must have saved by then
        # A signal that is ignored (nohup, a background job of a shell) stays ignored, here and in the ranks.
        signals_to_handle=",".join(
            number.name
            for number in (*STOP_SIGNALS, signal.SIGQUIT)
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGTERM
        ),
    )
    # The agent substitutes ${...} in string arguments; $$ is the agent's escape for a plain $.
    interpreter, *command = python_command(
        "-m", "aliquot.distributed.rank_process", str(os.getpid()), str(program.log_directory), *program.argv
    )
    errors = ErrorLog()
    environ = {ERROR_LOG: errors.path, SECRET_VARIABLE: group.secret}
    os.environ.update(environ)
    try:
        if round is None:
            elastic_launch(config, interpreter)(*(argument.replace("$", "$$") for argument in command))
        else:
            with fork_server_errors():
                elastic_launch(config, run_forked_rank)(
                    {ROUND: str(round), **environ}, program.log_directory, program.argv
                )
    except ChildFailedError as failed:
        return explain_failure(failed.failures, errors.read(), program.log_directory)
    except SignalException as stopped:
        return explain_stop(signal.Signals(stopped.sigval), errors.read())
    except (DistError, ElasticRendezvousError) as error:
        raise RendezvousError(
            f"the {group.nodes} nodes could not be brought together at {group.address}:{group.port}, as node"
            f" {group.node}: {error}"
        ) from error
    finally:
        if round is not None:
            end_forked_ranks()
        errors.close()
    return Ended(0)


class AgentRendezvous(StaticTCPRendezvous):
    """Give torch's elastic agent the store in which the launchers have already joined; the ranks use it as well.

    torch's handlers open a store that listens on every address. torch's handler `c10d` also unpickles values of that
    store.
    """

    def __init__(self, group: NodeGroup) -> None:
        super().__init__(group.address, group.port, group.node, group.nodes, group.run_id, timeout=0)
        self._agents = group.store.with_prefix("agents")

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        bootstrap = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(self._agents, self.rank, self.world_size, bootstrap)


rendezvous_handler_registry.register(_BACKEND, lambda parameters: AgentRendezvous(parameters.config[_GROUP]))
