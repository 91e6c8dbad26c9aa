"""Count what a rank needs as the number of ranks grows: connections, threads, memory, messages and CPU seconds.

python benchmarks/scale.py --ranks 16 64 128 256 --json scale.json
python benchmarks/scale.py --ranks 4 8 16 --ranks-per-host 1                  one rank on every host
python benchmarks/scale.py --ranks 32 --shape 70b                             as many tensors as Llama-3-70B

All ranks run on this machine, as forks of one process that has imported torch. Ranks of a simulated host share memory;
hosts exchange messages through gloo on loopback. Every world trains three steps, saves, exports, and resumes for one
more step. Seconds are CPU seconds of a rank, because the ranks share few cores. A row is the median over ranks; rank 0,
which serves the rendezvous store and writes manifests, has columns of its own. The last row is the exponent of growth:
1 is linear in the number of ranks.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from json import loads
from pathlib import Path
from secrets import token_hex
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import scale_rank, smoke
from benchmarks.layouts import llama_config
from benchmarks.report import Row, Target, finish, target

MIB = 1 << 20
ERRORS_S = 1.0
FOLLOWS = ("PeerLost", "closed by peer")  # in the log of a rank that failed because another one had failed
IDLE_BYTES = 64  # of a connection that has carried no message: gloo writes a sequence number when it connects
TINY = {**smoke.TINY, "num_hidden_layers": 2}
# As many layers, experts and tensors as the models named, with tiny widths.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": llama_config(TINY),
    "70b": llama_config({**smoke.TINY, "num_hidden_layers": 80}),
    "235b": {
        **smoke.TINY, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 16,
        "num_hidden_layers": 94, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 8,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip
MODELS = ("transformers.models.llama.modeling_llama", "transformers.models.qwen3_moe.modeling_qwen3_moe")
RankCounts = dict[str, Any]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 128, 256])
    arguments.add_argument("--ranks-per-host", type=int, default=8)
    arguments.add_argument("--shape", choices=SHAPES, default="tiny")
    arguments.add_argument("--engine", choices=("host", "fsdp"), default="host")
    given = smoke.parse(arguments, ranks=[2, 4], ranks_per_host=2)
    if any(count % given.ranks_per_host for count in given.ranks):
        sys.exit(f"every number of ranks must be a multiple of --ranks-per-host {given.ranks_per_host}")
    _prepare_parent()
    rows = []
    for count in given.ranks:
        rows.append(_measured(count, given))
        print(rows[-1], flush=True)
    targets = _targets(rows, given)
    if len(rows) > 1:
        rows.append(_growth(rows))
    finish(f"{given.shape}, engine {given.engine}, {given.ranks_per_host} ranks per host", rows, targets, given.json)


def _prepare_parent() -> None:
    """Import the modules that a rank needs, so that forked ranks share their pages. Nothing computes here."""
    gc.disable()
    from tests.tools.warm_server import IMPORTED

    from aliquot.cli.train_command import RANK_MODULES

    for name in ("aliquot.cli.main", *RANK_MODULES, *IMPORTED, *MODELS):
        import_module(name)
    gc.freeze()  # a garbage collection in a rank would otherwise write to all shared pages
    gc.enable()


def _measured(count: int, given: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory(prefix="aliquot-scale-") as folder:
        values = _config(Path(folder), given)
        began = time.monotonic()
        trained = _world(count, given.ranks_per_host, values, Path(folder) / "trained")
        trained_s = time.monotonic() - began
        values["train"]["max_steps"] += 1
        shutil.rmtree(Path(folder) / "run" / "export")
        resumed = _world(count, given.ranks_per_host, values, Path(folder) / "resumed")
        print(f"{count} ranks: {trained_s:.0f} s, {time.monotonic() - began - trained_s:.0f} s resumed", flush=True)
        return _row(trained, resumed, given.ranks_per_host)


def _config(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "run": {"name": "scale", "directory": str(folder / "run")},
        "model": {"config": SHAPES[given.shape]},
        "data": {"path": str(smoke.text()), "tokenizer": str(smoke.tokenizer()), "sequence_length": 64},
        "train": {"max_steps": scale_rank.LAST_STEP, "precision": "fp32", "learning_rate": 1e-4, "compile": "none"},
        "shard": {"engine": given.engine},
        "launch": {"device": "cpu", "threads_per_rank": 1},
        "observe": {"report_to": [], "console": "quiet"},
    }


def _world(count: int, per_host: int, values: dict[str, Any], folder: Path) -> list[RankCounts]:
    """Fork `count` ranks and return their counts. Exit with the log of a rank that failed."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secret, ranks = token_hex(32), {}
    for rank in range(count):
        environ = {
            "RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank % per_host, "LOCAL_WORLD_SIZE": per_host,
            "GROUP_RANK": rank // per_host, "GROUP_WORLD_SIZE": count // per_host, "HOST": f"host-{rank // per_host}",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1,
            "ALIQUOT_SECRET": secret,
        }  # fmt: skip
        child = os.fork()
        if child == 0:
            scale_rank.run({name: str(value) for name, value in environ.items()}, values, folder / f"{rank}.json")
        ranks[child] = rank
    failed: list[int] = []
    while ranks:
        child, status = os.waitpid(-1, 0)
        rank = ranks.pop(child)
        if status:
            time.sleep(0 if failed else ERRORS_S)  # let other ranks report as well: the first to end may only follow
            failed.append(rank)
            for other in ranks:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    if failed:
        logs = {rank: (folder / f"{rank}.log").read_text() for rank in range(count)}
        causes = [rank for rank, log in logs.items() if "Error" in log and not any(words in log for words in FOLLOWS)]
        causes = causes or failed
        sys.exit(f"rank {causes[0]} of {count} failed:\n{logs[causes[0]][-3000:]}")
    return [loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def _row(trained: Sequence[RankCounts], resumed: Sequence[RankCounts], per_host: int) -> Row:
    pairs, idle = _pairs(trained)
    between_hosts = [number for (a, b), number in pairs.items() if a // per_host != b // per_host]
    peers = Counter(rank for pair in pairs for rank in pair)
    steps = scale_rank.LAST_STEP - scale_rank.FIRST_STEP
    sent = [_sent(rank["traffic"]) for rank in trained]
    other_hosts = len(trained) // per_host - 1
    row: Row = {
        "ranks": len(trained),
        "connections": statistics.median(len(rank["traffic"][-1]) for rank in trained),
        "of a pair": max(between_hosts, default=0),
        "idle": idle / len(trained),
        "peers": statistics.median(peers[rank] for rank in range(len(trained))),
        "descriptors, rank 0": trained[0]["descriptors"],
        "threads": statistics.median(rank["threads"] for rank in trained),
        "private MiB": statistics.median(rank["private_bytes"] for rank in trained) / MIB,
        "copied MiB": statistics.median(rank["copied_bytes"] for rank in trained) / MIB,
        "messages of a step and host": statistics.median(
            (rank["messages"][-1] - rank["messages"][0]) / steps / max(1, other_hosts) for rank in trained
        ),
        "segments of a step and peer": statistics.median(
            segments / steps / peers[rank] for rank, (_, segments) in enumerate(sent) if peers[rank]
        ) if peers else 0.0,
        "KB sent in a step": statistics.median(sent_bytes for sent_bytes, _ in sent) / steps / 1e3,
    }  # fmt: skip
    for name, ranks, first, last in PHASES:
        seconds = [_seconds(rank["marks"], first, last) for rank in (trained if ranks == "trained" else resumed)]
        row[f"{name} s"] = statistics.median(seconds)
        if name in OF_RANK_0:
            row[f"{name} s, rank 0"] = seconds[0]
    return row


OF_RANK_0 = ("join", "save", "resume")  # rank 0 serves the store, and writes and verifies the manifest
PHASES = (
    # name, world, the phase's first stage, the stage after the phase
    ("join", "trained", "FORK", "reading and tokenising the data"),
    ("start", "trained", "reading and tokenising the data", "in"),
    ("step", "trained", "in", "in"),
    ("save", "trained", "saving", "generating the sample"),
    ("export", "trained", "exporting the model", "END"),
    ("resume", "resumed", "loading weights", "preparing the engine"),
)


def _seconds(marks: Sequence[tuple[str, int, float]], first: str, last: str) -> float:
    """Return the CPU seconds of a phase; of a step, the mean of the steps whose connections are counted."""
    if first == last:
        begin, end = (
            next(seconds for stage, step, seconds in marks if (stage, step) == (first, number))
            for number in (scale_rank.FIRST_STEP, scale_rank.LAST_STEP)
        )
        return (end - begin) / (scale_rank.LAST_STEP - scale_rank.FIRST_STEP)
    index = next(index for index, mark in enumerate(marks) if mark[0] == first)
    later = marks[index:]
    return next((seconds for stage, _, seconds in later if stage == last), later[-1][2]) - marks[index][2]


def _pairs(ranks: Sequence[RankCounts]) -> tuple[dict[tuple[int, int], int], int]:
    """Return the number of connections of every pair of ranks, and the number of ends without any message."""
    owner = {(row[0], row[1]): rank for rank, counts in enumerate(ranks) for row in counts["traffic"][-1]}
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    for (local, remote), rank in owner.items():
        peer = owner.get((remote, local))
        if peer is not None and rank < peer:
            pairs[rank, peer] += 1
    rows = [row for counts in ranks for row in counts["traffic"][-1]]
    return pairs, sum(max(row[2:4]) < IDLE_BYTES for row in rows)


def _sent(traffic: Sequence[Sequence[Sequence[int]]]) -> tuple[int, int]:
    """Return bytes and segments that a rank has sent between the two counts of its connections."""
    before = {tuple(row[:2]): row for row in traffic[0]}
    sent = segments = 0
    for row in traffic[1]:
        old = before.get(tuple(row[:2]), [0, 0, 0, 0, 0])
        sent, segments = sent + row[2] - old[2], segments + row[4] - old[4]
    return sent, segments


def _growth(rows: Sequence[Row]) -> Row:
    """Fit value = a * ranks^exponent to every column, and return the exponents."""
    counts = np.log([row["ranks"] for row in rows])
    exponents: Row = {"ranks": "exponent"}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name != "ranks" and min(values) > 0:
            exponents[name] = float(np.polyfit(counts, np.log(values), 1)[0])
    return exponents


def _targets(rows: Sequence[Row], given: argparse.Namespace) -> list[Target]:
    smallest, largest = rows[0], rows[-1]
    threads = largest["threads"] / smallest["threads"] if len(rows) > 1 else None
    messages = "messages of a step and host"
    per_host = largest[messages] / smallest[messages] if len(rows) > 1 and smallest[messages] else None
    return [
        target("scale_connections_of_a_pair", largest["of a pair"], 4, "lower"),
        target("scale_idle_connections", largest["idle"], 0, "lower"),
        target("scale_threads_growth", threads, 1.3, "lower"),
        *([target("scale_private_mib", largest["private MiB"], 64, "lower")] if given.shape == "tiny" else []),
        target("scale_join_cpu_s", largest["join s"], 2, "lower"),
        target("scale_messages_growth", per_host, 1.3, "lower"),
    ]


if __name__ == "__main__":
    main()
