"""Decide whether this process is a rank, a launcher or the only process of a run, and start the ranks of a launcher.

A process is a rank if torchrun, srun or aliquot's launcher has set the environment variables of a rank. Otherwise the
configuration and the environment, such as the PET_* variables of a Kubeflow TrainJob, give the numbers of ranks and
nodes.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import FewerRanksFitError, LaunchError, writing
from aliquot.distributed.rank_errors import LOG_DIRECTORY
from aliquot.distributed.run_secret import common_secret
from aliquot.distributed.signals import exit_on_sigterm
from aliquot.distributed.topology import integer_variable, port_variable

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")  # infer_local_ranks infers LOCAL_RANK and others
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds, read by torchrun unless its command line has the option
_TORCHRUN_SHUTDOWN_S = 30  # the default of torchrun


def launch_mode(launch: LaunchSection, environ: Mapping[str, str]) -> Literal["rank", "launcher", "alone"]:
    """Return the role of this process. Call this after `apply_environment` and `resolve_auto_ranks`."""
    missing = [name for name in RANK_VARIABLES if name not in environ]
    if not missing:
        return "rank"
    if "RANK" in environ and environ.get("WORLD_SIZE", "1") != "1":
        raise LaunchError(
            f"RANK is set, so this is one rank of many, but {', '.join(missing)} is not set: use torchrun"
        )
    launch = apply_environment(launch, environ)
    has_one_node = launch.most_nodes == 1 and not launch.is_elastic
    return "alone" if has_one_node and launch.ranks in (1, "auto") else "launcher"


def apply_environment(launch: LaunchSection, environ: Mapping[str, str]) -> LaunchSection:
    """Return `launch` with the nodes, ranks and master that the environment names. Raises LaunchError.

    The PET_* variables of a TrainJob override the configuration. Users may export WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT without RANK, as for torchrun; these apply to keys that the configuration leaves out. In a rank,
    `launch` is returned unchanged, because the launcher has already applied the variables.
    """
    if all(name in environ for name in RANK_VARIABLES):
        return launch
    if "PET_NNODES" not in environ:
        return _apply_exported(launch, environ)
    update: dict[str, object] = {
        "nodes": _nodes(launch, environ),
        "node_rank": integer_variable(environ, "PET_NODE_RANK", launch.node_rank),
        "master_address": environ.get("PET_MASTER_ADDR", launch.master_address),
        "master_port": port_variable(environ, "PET_MASTER_PORT", launch.master_port),
    }
    if environ.get("PET_NPROC_PER_NODE", "auto") not in ("auto", "cpu", "gpu"):
        update["ranks"] = integer_variable(environ, "PET_NPROC_PER_NODE", 0, 1)
    placed = launch.model_copy(update=update)
    if placed.node_rank >= placed.most_nodes:
        raise LaunchError(
            f"PET_NODE_RANK is {placed.node_rank}, but there are only {placed.most_nodes} nodes (PET_NNODES)"
        )
    return placed


def _nodes(launch: LaunchSection, environ: Mapping[str, str]) -> int | str:
    """Return the nodes in PET_NNODES, a number or MIN:MAX; a number is the maximum if the configuration is elastic."""
    text = environ["PET_NNODES"]
    if ":" in text:
        try:
            return LaunchSection(nodes=text).nodes
        except ValidationError:
            raise LaunchError(f"the environment variable PET_NNODES is {text!r}: give a number, or MIN:MAX") from None
    nodes = integer_variable(environ, "PET_NNODES", 0, 1)
    return f"{min(launch.fewest_nodes, nodes)}:{nodes}" if launch.is_elastic else nodes


def _apply_exported(launch: LaunchSection, environ: Mapping[str, str]) -> LaunchSection:
    update: dict[str, object] = {}
    if "WORLD_SIZE" in environ and "RANK" not in environ and launch.ranks == "auto":
        world_size = integer_variable(environ, "WORLD_SIZE", 0, 1)
        if world_size % launch.most_nodes:
            raise LaunchError(
                f"WORLD_SIZE is {world_size}, which {launch.most_nodes} nodes cannot share: set launch.ranks"
            )
        update["ranks"] = world_size // launch.most_nodes
    if "MASTER_ADDR" in environ and "master_address" not in launch.model_fields_set:
        update["master_address"] = environ["MASTER_ADDR"]
    if "MASTER_PORT" in environ and "master_port" not in launch.model_fields_set:
        update["master_port"] = port_variable(environ, "MASTER_PORT", launch.master_port)
    return launch.model_copy(update=update)


def start_ranks(
    launch: LaunchSection, argv: list[str], log_directory: Path, grace_s: float, automatic: bool = False,
    run_directory: Path | None = None,
) -> int:  # fmt: skip
    """Run `python ARGV` as every local rank, wait for the ranks, and return the exit code of this process.

    Rank 0 prints to this console, rank N to rank-N.log in `log_directory`. When a rank dies, all ranks end, and a line
    or two name the rank that failed first. The exit code is 2 for bad input, and 128 + signal if this process received
    a stop signal.

    Args:
        automatic: whether launch.ranks was auto. If so, all nodes start the smallest number that any node has chosen,
            and a single node halves the number if the plan says that fewer ranks fit into memory.
        run_directory: a directory that all nodes share, which holds their common secret.
    """
    log_directory = prepare_log_directory(log_directory)
    launch = apply_environment(launch, os.environ)
    from aliquot.distributed.local_group import RankProgram, run_local_ranks
    from aliquot.distributed.rendezvous import meet_nodes, single_node

    if launch.most_nodes > 1:
        with exit_on_sigterm("before the nodes had met"):
            group, ranks = meet_nodes(launch, automatic, common_secret(os.environ, run_directory))
    else:
        group, ranks = single_node(), int(launch.ranks)
    ended = run_local_ranks(ranks, group, RankProgram(argv, log_directory, grace_s))
    while automatic and group.nodes == 1 and ranks > 1 and ended.id == FewerRanksFitError.id:
        print(f"aliquot: {ranks} ranks do not fit into memory: starting {ranks // 2}", file=sys.stderr, flush=True)
        ranks //= 2
        ended = run_local_ranks(ranks, single_node(), RankProgram(argv, log_directory, grace_s))
    if ended.lines:
        print("\n".join(ended.lines), file=sys.stderr)
    return ended.code


def prepare_log_directory(directory: Path) -> Path:
    """Create the directory of the ranks' logs and return its absolute path. Raises StorageError."""
    directory = directory.absolute()
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def torchrun_advice(environ: Mapping[str, str], grace_s: float, command: bytes) -> list[str]:
    """Return a warning if torchrun would kill ranks before they have saved, otherwise an empty list.

    `command` is the command line of torchrun in the form of /proc. Its option has priority over the environment.
    """
    default = f"\0--shutdown-timeout={environ.get(_SHUTDOWN_TIMEOUT, '')}".encode()
    timeout = re.search(rb"--shutdown[-_]timeout[=\0](\d+)", command + default)
    shutdown_s = int(timeout[1]) if timeout else _TORCHRUN_SHUTDOWN_S
    if "TORCHELASTIC_RUN_ID" not in environ or LOG_DIRECTORY in environ or grace_s + 10 <= shutdown_s:
        return []
    enough_s = math.ceil(grace_s) + 10
    return [
        f"on SIGTERM torchrun kills its ranks after {shutdown_s} s: start it with --shutdown-timeout {enough_s}, or"
        f" {_SHUTDOWN_TIMEOUT}={enough_s} in its environment"
    ]
