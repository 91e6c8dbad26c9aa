"""A rank of test_proof.py: two nodes with one rank each, where the doctor finds a problem on the second node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from aliquot.distributed.ranks import Ranks
from aliquot.distributed.topology import Topology
from aliquot.doctor import node_proof
from aliquot.doctor.finding import Finding, Subject
from tests.processes import as_ranks


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    def examine(subject: Subject) -> Iterator[Finding]:  # the real doctor takes ten seconds
        yield Finding("thp", "huge pages", "ok", "madvise", "nothing to do")
        yield Finding("cores", "cores", "warning", "shared", "slower", "more cores")
        if rank == 1:
            yield Finding("storage", "run directory", "problem", "read-only", "no run can be written here")

    node_proof.examine = examine
    topology = Topology(rank, world_size, 0, 1, rank, world_size, "cpu", threads=1, cores=())
    ranks = Ranks(topology, frozenset({0}))
    expected = node_proof.Expected(world_size, network_bytes_per_s=1e6, storage_bytes_per_s=1e6, efa_interfaces=1)
    proof = node_proof.measure(ranks, folder, expected)
    (folder / f"{rank}.json").write_text(json.dumps(asdict(proof)))


if __name__ == "__main__":
    as_ranks(work)
