"""Parts of a step by themselves: the sum of gradients over ranks, the optimizer's update, weights' gradients from
transposed copies and as they are, logits.

python benchmarks/parts.py --json parts.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.report import Row, finish, target
from benchmarks.worlds import run_world, tell

SUM_BYTES, PIECE_BYTES = smoke.choose((64 << 20, 8 << 20), (8 << 20, 1 << 20))
PARAMETERS = smoke.choose(32 << 20, 1 << 20)
REPEATS = smoke.choose(7, 1)
GRADIENTS: tuple[tuple[int, int, int], ...] = (
    (512, 2048, 768),
    (512, 768, 2048),
    (2048, 768, 256),
    (2048, 2048, 768),
    (2048, 768, 2048),
)
GRADIENTS = smoke.choose(GRADIENTS, GRADIENTS[:1])
LOGITS: tuple[tuple[int, int, int], ...] = ((512, 768, 32000), (2048, 768, 32000), (512, 2048, 128256))
LOGITS = smoke.choose(LOGITS, LOGITS[:1])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    given = smoke.parse(arguments)
    from aliquot.machine.allocator import allocator_environment

    rows: list[Row] = []
    targets = []
    for world_size in (2, 4):
        ranks = run_world(__file__, world_size, "sum")
        if "failed" in ranks[0]:
            raise SystemExit(ranks[0]["failed"])
        ours, gloo = (max(rank[who] for rank in ranks) for who in ("ours", "gloo"))
        rows.append({"what": f"sum of 64 MiB of fp32, {world_size} ranks", "aliquot_ms": ours, "peer_ms": gloo,
                     "peer": "gloo reduce-scatter"})  # fmt: skip
        targets.append(target(f"reduce_speedup_64mb_{world_size}_ranks", gloo / ours, 8, "higher"))
    for compiled in (True, False):
        ranks = run_world(__file__, 2, "update", str(compiled))
        if "failed" in ranks[0]:
            raise SystemExit(ranks[0]["failed"])
        ours, fused = (statistics.mean(rank[who] for rank in ranks) for who in ("ours", "fused"))
        how = "compiled" if compiled else "eager"
        rows.append({"what": f"clip, AdamW, publish bf16; 32 M parameters per core, {how}", "aliquot_ms": ours,
                     "peer_ms": fused, "peer": "torch fused AdamW alone, fp32"})  # fmt: skip
        name = "adamw_of_fused" if compiled else "adamw_of_fused_eager"
        targets.append(target(name, fused / ours, 1.0, "higher"))
    environ = {
        "LD_PRELOAD": allocator_environment(os.environ).get("LD_PRELOAD", "")
    }  # otherwise page faults would take most of the time
    ranks = run_world(__file__, 2, "products", environ=environ)
    if "failed" in ranks[0]:
        raise SystemExit(ranks[0]["failed"])
    for shape in GRADIENTS:
        tokens, outputs, inputs = shape
        copied, plain = (statistics.mean(rank[f"{how} {shape}"] for rank in ranks) for how in ("copied", "plain"))
        rows.append({"what": f"gradient of a weight of {outputs} x {inputs} by {tokens} tokens, bf16, from a copy",
                     "aliquot_ms": copied, "peer_ms": plain, "peer": "torch: a transposed left side"})  # fmt: skip
    for shape in LOGITS:
        ours, whole = (statistics.mean(rank[f"{how} {shape}"] for rank in ranks) for how in ("columns", "whole"))
        rows.append({"what": f"logits of {shape[0]} tokens of {shape[1]}, vocabulary {shape[2]}, bf16, in blocks of "
                     "columns", "aliquot_ms": ours, "peer_ms": whole, "peer": "torch: at once"})  # fmt: skip
    for row in rows:
        row |= {column: 1e3 * row[column] for column in ("aliquot_ms", "peer_ms")}
    finish("parts of a step", rows, targets, given.json)


def seconds(work: Callable[[], object], barrier: Callable[[], object]) -> float:
    taken = []
    for _ in range(REPEATS + 2):
        barrier()
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


def sums() -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from aliquot.distributed.collectives.peers import Peers
    from aliquot.distributed.collectives.reduce import add_sum
    from aliquot.distributed.collectives.ring import Piece, Ring
    from aliquot.distributed.ranks import gather

    peers = Peers.join(dist.get_rank(), gather)
    ring = Ring(peers, SUM_BYTES)
    numel, piece_numel = SUM_BYTES // 4, PIECE_BYTES // 4
    gradient, share = torch.randn(numel), piece_numel // peers.size
    own = torch.empty(numel // peers.size)

    def ours() -> None:
        for number in range(numel // piece_numel):
            piece = ring.stage(PIECE_BYTES)
            space = ring.view(piece, peers.index, torch.float32, 0, (piece_numel,))
            space.copy_(gradient[number * piece_numel :][:piece_numel])

            def read(piece: Piece, number: int = number) -> None:
                sources = [
                    ring.view(piece, rank, torch.float32, peers.index * share, (share,)) for rank in range(peers.size)
                ]
                add_sum(own[number * share : (number + 1) * share], sources, first=True)

            ring.publish(piece, read)
        ring.drain()

    scattered = torch.empty(numel // peers.size)
    return {
        "ours": seconds(ours, dist.barrier),
        "gloo": seconds(lambda: dist.reduce_scatter_single(scattered, gradient), dist.barrier),
    }


def updates(compiled: bool) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from aliquot.optim.adamw import BlockedAdamW, FlatShard
    from aliquot.optim.master_weights import PairedWeights, SplitWeights
    from aliquot.optim.moments import moment

    values, gradient = torch.randn(PARAMETERS), torch.randn(PARAMETERS)
    weights = (PairedWeights if compiled else SplitWeights)(torch.empty(PARAMETERS, dtype=torch.bfloat16))
    weights.store(0, values)
    first, second = (moment("fp32", PARAMETERS, PARAMETERS, squared) for squared in (False, True))
    shard = FlatShard(weights, first, second, gradient, decays=True, start=0)
    ours = BlockedAdamW((0.9, 0.999), 1e-8, 0.1, compiled=compiled)
    parameter = torch.nn.Parameter(values)
    parameter.grad = gradient
    fused = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    return {
        "ours": seconds(lambda: ours.step([shard], 1e-3, 2.0, 1.0), dist.barrier),
        "fused": seconds(fused.step, dist.barrier),
    }


def products() -> dict[str, float]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    import aliquot.engines.model_kernels  # noqa: F401  defines the copy
    from aliquot.nn.head_loss import FusedLoss

    apart = torch.zeros(2, 16 << 20)
    found = {}

    def from_copy(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.ops.aliquot.transposed_copy(gradient), x)

    def measure(name: str, work: Callable[[], object]) -> None:
        def others() -> None:
            apart[0].add_(apart[1])  # evicts the caches, which hold other data in a step
            dist.barrier()

        found[name] = seconds(work, others)

    for tokens, outputs, inputs in GRADIENTS:
        gradient, x = torch.randn(tokens, outputs).bfloat16(), torch.randn(tokens, inputs).bfloat16()
        shape = (tokens, outputs, inputs)
        measure(f"copied {shape}", partial(from_copy, gradient, x))
        measure(f"plain {shape}", partial(torch.mm, gradient.t(), x))
    loss = FusedLoss(1 << 20, copies_transposed=True)
    for tokens, inputs, vocabulary in LOGITS:
        hidden, weight = torch.randn(tokens, inputs).bfloat16(), torch.randn(vocabulary, inputs).bfloat16()
        shape = (tokens, inputs, vocabulary)
        measure(f"columns {shape}", partial(loss.logits, hidden, weight))
        measure(f"whole {shape}", partial(F.linear, hidden, weight))
    return found


def rank() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    dist.init_process_group("gloo")
    if sys.argv[2] == "update":
        tell(updates(sys.argv[3] == "True"))
    else:
        tell(sums() if sys.argv[2] == "sum" else products())
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
