"""What two ranks on this machine really do: right sums and averages, and products at the rate of the instructions."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from typing import Any

from aliquot.core.interpreter import python_command
from aliquot.distributed.run_secret import SECRET, new_secret
from aliquot.doctor.finding import Finding, Subject
from aliquot.machine.cgroup import read
from aliquot.machine.cpu import FLOP_PER_CYCLE

_TIMEOUT_S = 180.0

_GOOD_PART = 0.35  # plain products of 1536 x 1536 reach 50 to 90 % of that on a quiet machine


def run_two_ranks(subject: Subject) -> dict[str, Any]:
    """What the two ranks told, or {"trouble": last line}. A few seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    secret = new_secret()
    processes = [_start(rank, port, secret, subject) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_S) for process in processes]
    except subprocess.TimeoutExpired:
        return {"trouble": f"they did not end within {_TIMEOUT_S:g} s"}
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
    variables[SECRET] = secret
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
    clock = re.search(r"^cpu MHz\s*:\s*([\d.]+)", read(subject.root / "proc/cpuinfo") or "", re.MULTILINE)
    of_bf16 = subject.cpu.multiplies_bf16
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
