"""Compare the nodes of a run with its plan: doctor on every node, network, shared file system, EFA.

The ranks of the run join as they do in training, but no model is loaded, so that a proof takes a minute or two.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from aliquot.config.schema import RunConfig
from aliquot.core.errors import ClusterError
from aliquot.core.number_format import byte_size, count_of, rate
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.topology import choose_device, place_rank
from aliquot.doctor.examine import examine
from aliquot.doctor.finding import Finding, Subject
from aliquot.machine.cpu import read_cpu
from aliquot.machine.storage import PIECE_BYTES, nearest_directory, written_bytes_per_s

_TIMEOUT_S = 900.0  # the doctor of another node may take minutes on a busy machine
_LEAST = 0.5  # a rate below this fraction of the expected rate is a problem
_REPEATS = 4  # timed all-gathers
_GATHER_S, _WRITE_S = 0.25, 2.0  # planned time of one all-gather, and of one write
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 256 << 20  # of a rank's piece in an all-gather


@dataclass(frozen=True)
class Expected:
    """The plan's expectations of the nodes. `aliquot cluster render --proof` writes them as JSON."""

    nodes: int
    network_bytes_per_s: float  # sent by a node to other nodes
    storage_bytes_per_s: float  # written by all nodes together
    efa_interfaces: int  # per node; 0: NCCL does not use EFA


def read_expected(file: Path) -> Expected:
    """Raises ClusterError if the file does not hold an `Expected` as JSON."""
    try:
        return TypeAdapter(Expected).validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClusterError(f"not the expectations of a plan: {' '.join(str(error).split())}", file) from None


@dataclass(frozen=True)
class ProofRow:
    """One line of the table: an expectation, its measurement, and a fix if the two differ."""

    subject: str
    expected: str
    measured: str
    fix: str = ""  # empty if the measurement is as expected


@dataclass(frozen=True)
class Proof:
    rows: tuple[ProofRow, ...]
    notes: tuple[str, ...]  # the doctor's problems and warnings


def prove_nodes(config: RunConfig, expected: Expected) -> Proof:
    """Join the ranks of the run, and measure. Collective: every rank returns the same proof. Raises UserError."""
    topology, _ = place_rank(config.launch, os.environ, read_cpu(), choose_device(config.launch.device))
    ranks = Ranks.join(topology, _TIMEOUT_S, config.launch.join_timeout_s)
    with ranks.closing():
        return measure(ranks, config.run.directory, expected)


def measure(ranks: Ranks, run_directory: Path, expected: Expected) -> Proof:
    """Measure with ranks that have joined already. Collective."""
    nodes = ranks.topology.nodes
    # Port 0 is always free: the store of the rendezvous occupies the port of the run.
    doctor, notes = _examine_nodes(ranks, Subject(run_directory=run_directory, port=0))
    fix = "" if nodes == expected.nodes else "render the proof again, after a change of cluster.nodes"
    rows = [ProofRow("nodes", str(expected.nodes), str(nodes), fix), doctor]
    if nodes > 1:
        rows += _network(ranks, expected)
    rows.append(_storage(ranks, run_directory, expected.storage_bytes_per_s))
    return Proof(tuple(rows), tuple(notes))


def _examine_nodes(ranks: Ranks, subject: Subject) -> tuple[ProofRow, list[str]]:
    """Run the doctor on the first rank of each node, with all cores, while the other ranks wait."""
    findings: list[dict[str, str]] = []
    if ranks.topology.local_rank == 0:
        with ranks.unpinned():
            findings = [asdict(finding) for finding in examine(subject) if finding.level != "ok"]
    entries = ranks.gather([platform.node(), findings])
    notes = [(node, Finding(**values)) for node, values_of_node in entries for values in values_of_node]
    return judge_doctor(ranks.topology.nodes, notes)


def judge_doctor(nodes: int, findings: Sequence[tuple[str, Finding]]) -> tuple[ProofRow, list[str]]:
    """Return a row that counts problems and warnings, and a text for each kind of finding, with its first node."""
    levels = Counter(finding.level for _, finding in findings)
    kinds = Counter((finding.level, finding.id) for _, finding in findings)
    first = {(finding.level, finding.id): (node, finding) for node, finding in reversed(findings)}
    notes = [
        f"{count_of(count, 'node')}, first {first[kind][0]}: {first[kind][1].text()}" for kind, count in kinds.items()
    ]
    measured = f"{count_of(levels['problem'], 'problem')}, {count_of(levels['warning'], 'warning')}"
    fix = "the fixes of the doctor, below" if levels["problem"] else ""
    return ProofRow(f"doctor on {count_of(nodes, 'node')}", "0 problems", measured, fix), notes


def _network(ranks: Ranks, expected: Expected) -> list[ProofRow]:
    topology, before = ranks.topology, efa_sent_bytes()
    sent, seconds = _all_gather(ranks, expected.network_bytes_per_s)
    bytes_per_s = sent / max(ranks.gather(seconds))  # the slowest rank decides
    efa_bytes = min(ranks.gather(efa_sent_bytes() - before))
    subject = f"all-gather of {topology.world_size} ranks, sent by a node"
    fix = "cluster.placement_group, or less other work on the nodes and their network"
    return [judge_rate(subject, expected.network_bytes_per_s, bytes_per_s, fix), judge_efa(expected, sent, efa_bytes)]


def _all_gather(ranks: Ranks, expected_bytes_per_s: float) -> tuple[int, float]:
    """All-gather among the ranks that have the same place on their nodes, all groups at once. Collective.

    Returns the bytes that a node sends in the timed all-gathers, and the seconds of this rank.
    """
    topology = ranks.topology
    local, others = topology.local_world_size, topology.nodes - 1
    groups = [dist.new_group(list(range(index, topology.world_size, local))) for index in range(local)]
    group = groups[topology.rank % local]
    planned_bytes = int(expected_bytes_per_s * _GATHER_S / (local * others))
    piece = torch.ones(min(_MOST_BYTES, max(_LEAST_BYTES, planned_bytes)), dtype=torch.uint8, device=topology.device)
    gathered = [torch.empty_like(piece) for _ in range(topology.nodes)]
    began = 0.0
    for number in range(_REPEATS + 1):
        if number == 1:  # the first all-gather connects the ranks
            ranks.barrier()
            began = time.perf_counter()
        dist.all_gather(gathered, piece, group=group)
        if topology.device == "cuda":
            torch.cuda.synchronize()
    return _REPEATS * local * others * piece.numel(), time.perf_counter() - began


def efa_sent_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that all EFA devices of this node have sent since they exist."""
    counters = (root / "sys/class/infiniband").glob("*/ports/*/hw_counters/tx_bytes")
    return sum(int(counter.read_text()) for counter in counters)


def _storage(ranks: Ranks, directory: Path, expected_bytes_per_s: float) -> ProofRow:
    """All ranks write at the same time, as they save a checkpoint. The slowest rank decides."""
    pieces = max(1, round(expected_bytes_per_s * _WRITE_S / (ranks.world_size * PIECE_BYTES)))
    ranks.barrier()
    rates = ranks.gather(written_bytes_per_s(nearest_directory(directory), pieces))
    subject = f"written by {count_of(ranks.world_size, 'rank')}"
    if None in rates:
        expected = rate(expected_bytes_per_s, "B/s")
        return ProofRow(subject, expected, f"{directory} cannot be written", "the mount and the owner of the directory")
    fix = "a faster file system (cluster.storage), or less other load on it"
    return judge_rate(subject, expected_bytes_per_s, ranks.world_size * min(rates), fix)


def judge_rate(subject: str, expected: float, measured: float, fix: str) -> ProofRow:
    """Return a row with a fix if less than half of the expected rate was measured."""
    return ProofRow(subject, rate(expected, "B/s"), rate(measured, "B/s"), fix if measured < _LEAST * expected else "")


def judge_efa(expected: Expected, sent_bytes: int, efa_bytes: int) -> ProofRow:
    """Return a row with a fix if the plan expects EFA, and EFA has sent less than half of the bytes of a node."""
    expectation = count_of(expected.efa_interfaces, "interface") if expected.efa_interfaces else "not used"
    measured = f"{byte_size(efa_bytes)} of {byte_size(sent_bytes)}" if efa_bytes else "not used"
    is_missing = expected.efa_interfaces > 0 and efa_bytes < _LEAST * sent_bytes
    return ProofRow("EFA", expectation, measured, "the log of NCCL above; the image's EFA plugin" if is_missing else "")
