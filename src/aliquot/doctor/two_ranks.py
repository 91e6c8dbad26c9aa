"""Two real ranks that pass numbers to each other in every way that training does, and multiply matrices at once.

`python -m aliquot.doctor.two_ranks` is one of them, by torchrun's variables; rank 0 prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from aliquot.config.schema import LaunchSection
from aliquot.core.interpreter import python_command
from aliquot.distributed.collectives.json_values import gather
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.reduce import add_sum
from aliquot.distributed.ranks import Ranks
from aliquot.distributed.run_secret import SECRET_VARIABLE, new_secret
from aliquot.distributed.topology import place_rank
from aliquot.doctor.finding import Finding, Subject
from aliquot.machine.cgroup import read_text
from aliquot.machine.cpu import FLOP_PER_CYCLE, read_cpu
from aliquot.machine.matmul import matmul_rate

_ENDED_S = 180.0

_GOOD_PART = 0.35  # plain products of 1536 x 1536 reach 50 to 90 % of that on a quiet machine
_TIMEOUT_S = 60.0
_NUMEL = 1 << 16
_PRECISIONS: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")


def run_two_ranks(subject: Subject) -> dict[str, Any]:
    """What the two ranks told, or {"trouble": last line}. A few seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    secret = new_secret()
    processes = [_start(rank, port, secret, subject) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=_ENDED_S) for process in processes]
    except subprocess.TimeoutExpired:
        return {"trouble": f"they did not end within {_ENDED_S:g} s"}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            lines = [line for line in errors.splitlines() if line.strip()]
            return {"trouble": lines[-1] if lines else f"exit code {process.returncode}"}
    told: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return told


def _start(rank: int, port: str, secret: str, subject: Subject) -> subprocess.Popen[str]:
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    variables[SECRET_VARIABLE] = secret
    kept = {name: value for name, value in subject.environ.items() if not name.startswith("TORCHELASTIC")}
    return subprocess.Popen(
        python_command("-m", "aliquot.doctor.two_ranks"),
        env=kept | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def judge_self_test(told: dict[str, Any]) -> Finding:
    """The finding for what two ranks told."""
    title = "two ranks"
    if "trouble" in told:
        fix = "see `interface`, `memory` and `versions`; a sandbox may forbid sockets or memfd_create"
        return Finding("self-test", title, "problem", told["trouble"], "ranks cannot be connected here", fix)
    wrong = sorted({name for of_rank in told["wrong"] for name in of_rank})
    if wrong:
        found, fix = f"wrong: {', '.join(wrong)}", "see `versions`; report it with `aliquot doctor --json`"
        return Finding("self-test", title, "problem", found, "training would go on with wrong gradients", fix)
    found = "sums, gathers and averages are right, by gloo, FSDP2 and shared memory"
    return Finding("self-test", title, "ok", found, "ranks of this machine can train together")


def judge_matmul(told: dict[str, Any], subject: Subject) -> Finding:
    """Measured FLOP/s of both ranks at once against what clock and instructions promise."""
    title = "matmul rate"
    if "trouble" in told:
        return Finding("matmul", title, "warning", "not measured", "see `self-test`", "see `self-test`")
    bf16, fp32 = (min(told["rates"][precision]) for precision in ("bf16", "fp32"))
    found = f"bf16 {bf16 / 1e9:.0f}, fp32 {fp32 / 1e9:.0f} GFLOP/s a rank, two of {told['threads']} threads at once"
    clock = re.search(r"^cpu MHz\s*:\s*([\d.]+)", read_text(subject.root / "proc/cpuinfo") or "", re.MULTILINE)
    of_bf16 = subject.cpu.has_bf16_instructions
    name, rate = ("bf16", bf16) if of_bf16 else ("fp32", fp32)
    if clock is None or not subject.cpu.isa:
        meaning = "the ceiling of MFU; what the instructions promise is not known here"
        return Finding("matmul", title, "ok", found, meaning)
    per_clock = FLOP_PER_CYCLE[subject.cpu.isa[0]][0 if of_bf16 else 1]
    promised = per_clock * float(clock[1]) * 1e6 * min(told["threads"], len(subject.cpu.cores))
    found += f"; {name} is {100 * rate / promised:.0f} % of {promised / 1e9:.0f} by clock and instructions"
    if rate < _GOOD_PART * promised:
        meaning = "the ceiling of every step: cores are shared with other work, throttled, or run slower kernels"
        fix = "see `kernels`, `cores` and `threads`; end other work; on a shared host take a larger or a dedicated one"
        return Finding("matmul", title, "warning", found, meaning, fix)
    if name == "bf16" and bf16 < fp32:
        meaning, fix = "bf16 is slower than fp32 here", "see `kernels`; or set train.precision=fp32"
        return Finding("matmul", title, "warning", found, meaning, fix)
    return Finding("matmul", title, "ok", found, "the ceiling of MFU")


def main() -> None:
    topology, _ = place_rank(LaunchSection(), os.environ, read_cpu(), "cpu")
    ranks = Ranks.join(topology, _TIMEOUT_S, join_timeout_s=_TIMEOUT_S)
    wrong = [name for name, right in examine(ranks).items() if not right]
    rates = {precision: ranks.gather(matmul_rate("cpu", precision, ranks.barrier)) for precision in _PRECISIONS}
    told: dict[str, Any] = {"wrong": ranks.gather(wrong), "rates": rates, "threads": topology.threads}
    if ranks.rank == 0:
        print(json.dumps(told))
        sys.stdout.flush()
    ranks.close()


def examine(ranks: Ranks) -> dict[str, bool]:
    """Whether each way of passing numbers gave the right ones on this rank. Collective."""
    values = [torch.arange(_NUMEL, dtype=torch.float32) * (rank + 1) for rank in range(ranks.world_size)]
    own, total = values[ranks.rank], sum(values, torch.zeros(_NUMEL))
    return {
        "all-gather by gloo": _all_gather(own, values),
        "reduce-scatter by gloo": _reduce_scatter(own, total, ranks),
        "average by FSDP2 on gloo": _average(ranks),
        "sum in shared memory": _shared_sum(own, total, ranks),
    }


def _all_gather(own: torch.Tensor, values: list[torch.Tensor]) -> bool:
    received = [torch.empty_like(own) for _ in values]
    dist.all_gather(received, own)
    return all(torch.equal(found, expected) for found, expected in zip(received, values, strict=True))


def _reduce_scatter(own: torch.Tensor, total: torch.Tensor, ranks: Ranks) -> bool:
    found = torch.empty(_NUMEL // ranks.world_size)
    dist.reduce_scatter_tensor(found, own)
    return torch.equal(found, total.view(ranks.world_size, -1)[ranks.rank])


def _average(ranks: Ranks) -> bool:
    """The gradient of a weight whose input is rank + 1 everywhere: its mean is that of 1 .. world size."""
    layer = torch.nn.Linear(4, 4, bias=False)
    fully_shard(layer)
    layer(torch.full((1, 4), float(ranks.rank + 1))).sum().backward()
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    expected = torch.full((4, 4), (ranks.world_size + 1) / 2)
    return torch.equal(gradient.full_tensor(), expected)


def _shared_sum(own: torch.Tensor, total: torch.Tensor, ranks: Ranks) -> bool:
    peers = Peers.join(ranks.rank, gather)
    views = [memory.tensor(0, (_NUMEL,), torch.float32) for memory in peers.share(own.nbytes)]
    views[peers.index].copy_(own)
    peers.barrier()
    found = torch.empty(_NUMEL)
    add_sum(found, views, first=True)
    peers.barrier()
    peers.close()
    return torch.equal(found, total)


if __name__ == "__main__":
    main()
