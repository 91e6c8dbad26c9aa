"""Checks with two real ranks, which run every collective of training, and multiply matrices at the same time.

`python -m aliquot.doctor.two_ranks` runs one of the ranks, with the environment variables of torchrun. Rank 0 prints
the results as JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from aliquot.config.schema import LaunchSection
from aliquot.core.errors import UserError
from aliquot.core.python_command import python_command
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.reduce import add_sum
from aliquot.distributed.ranks import Ranks, gather
from aliquot.distributed.rendezvous import NodeGroup, single_node
from aliquot.distributed.run_secret import SECRET_VARIABLE
from aliquot.distributed.topology import place_rank
from aliquot.doctor.finding import Case, Finding, Subject, check, conclude
from aliquot.machine.cgroup import read_text
from aliquot.machine.cpu import FLOP_PER_CYCLE, faster_precision, read_cpu
from aliquot.machine.matmul import matmul_rate

_PROCESS_TIMEOUT_S = 180.0

_MIN_EFFICIENCY = 0.35  # products of 1536 x 1536 reach 50 to 90 % of the peak on a quiet machine
_TIMEOUT_S = 60.0
_NUMEL = 1 << 16
_PRECISIONS: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")


def run_two_ranks(subject: Subject) -> dict[str, Any]:
    """Run two ranks for a few seconds. Return the report of rank 0, or {"failure": last line of the error}."""
    try:
        group = single_node()
    except UserError as error:
        return {"failure": error.line}
    processes = [_start(rank, group, subject) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=_PROCESS_TIMEOUT_S) for process in processes]
    except subprocess.TimeoutExpired:
        return {"failure": f"they did not end within {_PROCESS_TIMEOUT_S:g} s"}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            lines = [line for line in errors.splitlines() if line.strip()]
            return {"failure": lines[-1] if lines else f"exit code {process.returncode}"}
    return cast("dict[str, Any]", json.loads(outputs[0][0].splitlines()[-1]))


def _start(rank: int, group: NodeGroup, subject: Subject) -> subprocess.Popen[str]:
    variables = {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": group.address, "MASTER_PORT": str(group.port), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        SECRET_VARIABLE: group.secret, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": group.run_id,
    }  # fmt: skip
    inherited = {name: value for name, value in subject.environ.items() if not name.startswith("TORCHELASTIC")}
    command, pipe = python_command("-m", "aliquot.doctor.two_ranks"), subprocess.PIPE
    return subprocess.Popen(command, env=inherited | variables, stdout=pipe, stderr=pipe, text=True)


@check("self-test", "two ranks")
def judge_self_test(report: dict[str, Any]) -> Finding:
    """Judge whether the collectives of two ranks gave correct results."""
    if "failure" in report:
        return Finding(
            "problem",
            report["failure"],
            meaning="ranks cannot be connected here",
            fix="see `interface`, `memory` and `versions`; a sandbox may forbid sockets or memfd_create",
        )
    wrong = sorted({name for names in report["wrong"] for name in names})
    return conclude(
        "sums, gathers and averages are right, by gloo, FSDP2 and shared memory",
        Case(
            wrong,
            "problem",
            state=f"wrong: {', '.join(wrong)}",
            meaning="training would continue with wrong gradients",
            fix="see `versions`; report it with `aliquot doctor --json`",
        ),
        ok="ranks of this machine can train together",
    )


@check("matmul", "matmul rate")
def judge_matmul(report: dict[str, Any], subject: Subject) -> Finding:
    """Compare the measured FLOP/s of two simultaneous ranks with the peak that clock and instructions allow."""
    if "failure" in report:
        return Finding("warning", "not measured", meaning="see `self-test`", fix="see `self-test`")
    bf16, fp32 = (min(report["rates"][precision]) for precision in ("bf16", "fp32"))
    observed = (
        f"bf16 {bf16 / 1e9:.0f}, fp32 {fp32 / 1e9:.0f} GFLOP/s a rank, two of {report['threads']} threads at once"
    )
    clock = re.search(r"^cpu MHz\s*:\s*([\d.]+)", read_text(subject.root / "proc/cpuinfo") or "", re.MULTILINE)
    name = faster_precision(subject.cpu.isa)
    rate = bf16 if name == "bf16" else fp32
    if clock is None or not subject.cpu.isa:
        return Finding("ok", observed, meaning="the ceiling of MFU; the peak by instructions is not known for this CPU")
    per_clock = FLOP_PER_CYCLE[subject.cpu.isa[0]][name == "fp32"]
    peak = per_clock * float(clock[1]) * 1e6 * min(report["threads"], len(subject.cpu.cores))
    return conclude(
        f"{observed}; {name} is {100 * rate / peak:.0f} % of {peak / 1e9:.0f} by clock and instructions",
        Case(
            rate < _MIN_EFFICIENCY * peak,
            "warning",
            meaning="the ceiling of every step: cores are shared with other work, throttled, or run slower kernels",
            fix="see `kernels`, `cores` and `threads`; end other work; on a shared host choose a larger instance",
        ),
        Case(
            name == "bf16" and bf16 < fp32,
            "warning",
            meaning="bf16 is slower than fp32 here",
            fix="see `kernels`; or set train.precision=fp32",
        ),
        ok="the ceiling of MFU",
    )


def main() -> None:
    topology, _ = place_rank(LaunchSection(), os.environ, read_cpu(), "cpu")
    ranks = Ranks.join(topology, _TIMEOUT_S, join_timeout_s=_TIMEOUT_S)
    wrong = [name for name, right in examine(ranks).items() if not right]
    rates = {precision: ranks.gather(matmul_rate("cpu", precision, ranks.barrier)) for precision in _PRECISIONS}
    report: dict[str, Any] = {"wrong": ranks.gather(wrong), "rates": rates, "threads": topology.threads}
    if ranks.rank == 0:
        print(json.dumps(report), flush=True)
    ranks.close()


def examine(ranks: Ranks) -> dict[str, bool]:
    """Return for each collective, by name, whether its result is correct on this rank. Collective."""
    values = [torch.arange(_NUMEL, dtype=torch.float32) * (rank + 1) for rank in range(ranks.world_size)]
    local, total = values[ranks.rank], sum(values, torch.zeros(_NUMEL))
    gathered = [torch.empty_like(local) for _ in values]
    dist.all_gather(gathered, local)
    scattered = torch.empty(_NUMEL // ranks.world_size)
    dist.reduce_scatter_single(scattered, local)
    return {
        "all-gather by gloo": torch.equal(torch.stack(gathered), torch.stack(values)),
        "reduce-scatter by gloo": torch.equal(scattered, total.view(ranks.world_size, -1)[ranks.rank]),
        "average by FSDP2 on gloo": _average(ranks),
        "sum in shared memory": _shared_sum(local, total, ranks),
    }


def _average(ranks: Ranks) -> bool:
    """Check that FSDP2 averages gradients: with the input rank + 1, the gradient is the mean of 1 to world size."""
    layer = torch.nn.Linear(4, 4, bias=False)
    fully_shard(layer)
    layer(torch.full((1, 4), float(ranks.rank + 1))).sum().backward()
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    return torch.equal(gradient.full_tensor(), torch.full((4, 4), (ranks.world_size + 1) / 2))


def _shared_sum(local: torch.Tensor, total: torch.Tensor, ranks: Ranks) -> bool:
    peers = Peers.join(ranks.rank, gather)
    views = [memory.tensor(0, (_NUMEL,), torch.float32) for memory in peers.share(local.nbytes)]
    views[peers.index].copy_(local)
    peers.barrier()
    summed = torch.empty(_NUMEL)
    add_sum(summed, views, first=True)
    peers.barrier()
    peers.close()
    return torch.equal(summed, total)


if __name__ == "__main__":
    main()
