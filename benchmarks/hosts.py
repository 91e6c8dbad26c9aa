"""Measure seconds and bytes of a step between hosts with links of several speeds, next to DeepSpeed and FSDP2.

python benchmarks/hosts.py --json hosts.json                                         needs root: network namespaces
python benchmarks/hosts.py --precision fp32 --tokens 128 --links none 1gbit          on cores without bf16

Hosts are network namespaces of one core and one rank each; tc limits their links. All contestants have tcmalloc if it
is installed, one thread, and a core of their own. The model has 125 M parameters and a learning rate of 2e-5. A row is
the median of all rounds' steps after the first two; contestants alternate. `planned_s` and `planned_mb` are the plan's
seconds and bytes of a step over that link, if each host has a core of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.multinode.namespaces import INTERFACE, switched_hosts, why_not

from benchmarks import smoke
from benchmarks.contestants import Work, aliquot_steps, deepspeed_seconds, fsdp2_steps, quiet, sent_when_still
from benchmarks.layouts import LLAMA_125M, LLAMA_500M, llama_config
from benchmarks.report import Row, Target, finish, target
from benchmarks.worlds import run_world, tell

if TYPE_CHECKING:
    from aliquot.planner.plan import Plan

SHAPES = {"125m": LLAMA_125M, "125m-tied": {**LLAMA_125M, "tie_word_embeddings": True}, "500m": LLAMA_500M}
SHAPES["tiny"] = smoke.TINY
WHO = {
    "aliquot": "fp32",
    "aliquot, reduce_dtype bf16": "bf16",
    "HF Trainer + DeepSpeed ZeRO-3": "deepspeed",
    "FSDP2": "fsdp2",
}
LEARNING_RATE = 2e-5
UNTIMED = 2


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="125m")
    arguments.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    arguments.add_argument("--tokens", type=int, default=512)
    arguments.add_argument("--micro-batches", type=int, default=4)
    arguments.add_argument("--hosts", type=int, nargs="+", default=[2, 3])
    arguments.add_argument("--links", nargs="+", default=["none", "10gbit", "2.5gbit", "1gbit"])
    arguments.add_argument("--who", nargs="+", choices=WHO.values(), default=list(WHO.values()))
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=2)
    shortest = {"hosts": [2], "links": ["none"], "micro_batches": 1, "tokens": 256, "steps": 1, "rounds": 1}
    given = smoke.parse(arguments, shape="tiny", precision="fp32", **shortest)
    if (reason := why_not()) is not None:
        sys.exit(reason)
    from aliquot.machine.allocator import allocator_environment

    preload = allocator_environment(os.environ).get("LD_PRELOAD", "")  # all contestants get the better allocator
    work = (given.shape, given.precision, str(given.tokens), str(given.micro_batches), str(UNTIMED + given.steps))
    seconds: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    sent: dict[tuple[int, str, str], float] = {}
    helping: dict[tuple[int, str, str], float] = {}
    for _ in range(given.rounds):
        for count in given.hosts:
            for link in given.links:
                with switched_hosts(count, None if link == "none" else link) as hosts:
                    environ = {
                        "MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1",
                        "LD_PRELOAD": preload,
                    }  # fmt: skip
                    prefixes = [host.command() for host in hosts]
                    for who in given.who:
                        found = run_world(__file__, count, who, *work, environ=environ, prefixes=prefixes)
                        if "failed" in found[0]:
                            print(who, link, found[0]["failed"], flush=True)
                            continue
                        key = (count, link, who)
                        seconds[key] += found[0]["seconds"]
                        sent[key] = sum(rank["sent"] for rank in found) / 1e6
                        helping[key] = max(rank["helping"] for rank in found)
                        print(*key, [round(second, 2) for second in found[0]["seconds"]], flush=True)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    names = {who: name for name, who in WHO.items()}
    plans = {key: _plan(given, *key) for key in medians if key[2] in ("fp32", "bf16")}
    limited = [key for key in plans if key[1] != "none" and key[0] <= len(os.sched_getaffinity(0))]
    of_time = [abs(plans[key].step_s / medians[key] - 1) for key in limited]
    of_wire = [abs(plan.wire_bytes_per_step / 1e6 / sent[key] - 1) for key, plan in plans.items()]
    rows: list[Row] = [
        {
            "shape": given.shape,
            "hosts": count,
            "link": link,
            "who": names[who],
            "step_s": median,
            "sent_mb": sent[count, link, who],
            "planned_s": plans[count, link, who].step_s if (count, link, who) in limited else None,
            "planned_mb": plans[count, link, who].wire_bytes_per_step / 1e6 if (count, link, who) in plans else None,
            "other_threads": helping[count, link, who],
            "deepspeed_over": _over(medians, (count, link, "deepspeed"), (count, link, who)),
            "fsdp2_over": _over(medians, (count, link, "fsdp2"), (count, link, who)),
            "over_unlimited": _over(medians, (count, link, who), (count, "none", who)),
        }
        for (count, link, who), median in sorted(medians.items())
    ]
    title = f"{given.shape}, {given.precision}, {given.micro_batches} x {given.tokens} tokens per rank and step"
    targets = _targets(medians, sent, given.precision)
    targets.append(target("hosts_plan_time", max(of_time, default=None), 0.10, "lower"))
    targets.append(target("hosts_plan_wire", max(of_wire, default=None), 0.02, "lower"))
    finish(f"steps between hosts: {title}", rows, targets, given.json)


def _plan(given: argparse.Namespace, hosts: int, link: str, reduce_dtype: str) -> Plan:
    """Plan for hosts that are one core of this machine each, measured while all of them compute."""
    from aliquot.config.read_config import validate
    from aliquot.data.workload import Workload
    from aliquot.distributed.topology import RankLayout
    from aliquot.planner.machine_profile import ensure_measured
    from aliquot.planner.planned_machine import Machine
    from aliquot.planner.planned_model import PlannedModel
    from aliquot.planner.planner import Planner

    train = {"precision": given.precision, "learning_rate": LEARNING_RATE, "max_steps": 1}
    values = {
        "model": {"config": dict(llama_config(SHAPES[given.shape]))},
        "data": {"path": "stdlib", "sequence_length": given.tokens},
        "train": {"gradient_accumulation_steps": given.micro_batches, **train},
        "shard": {"engine": "host", "reduce_dtype": reduce_dtype},
    }
    run = validate(values, {}, "hosts")
    bytes_per_s = None if link == "none" else float(link.removesuffix("gbit")) * 1e9 / 8
    machine = replace(Machine.local(), network_bytes_per_s=bytes_per_s)
    ensure_measured(machine, RankLayout(1, hosts, 1, "cpu"))
    return Planner(PlannedModel(run), machine).plan(run, RankLayout(hosts, 1, 1, "cpu"), Workload.assumed(run))


def _over(
    medians: dict[tuple[int, str, str], float], one: tuple[int, str, str], other: tuple[int, str, str]
) -> float | None:
    return medians[one] / medians[other] if one in medians and other in medians else None


def _targets(
    medians: dict[tuple[int, str, str], float], sent: dict[tuple[int, str, str], float], precision: str
) -> list[Target]:
    """Return the goals. Megabytes count only in bf16, for which their goals are set."""
    in_bf16 = precision == "bf16"
    found = []
    for who, speedup, mb in (("fp32", 2.6, 540), ("bf16", 3.4, 290)):
        over = _over(medians, (2, "1gbit", "deepspeed"), (2, "1gbit", who))
        found.append(target(f"hosts_speedup_1g_{who}", over, speedup, "higher"))
        found.append(target(f"hosts_mb_{who}", sent.get((2, "none", who)) if in_bf16 else None, mb, "lower"))
    waits = _over(medians, (2, "1gbit", "bf16"), (2, "none", "bf16"))
    found.append(target("hosts_waiting_1g", waits, 1.25, "lower"))
    waits = _over(medians, (2, "10gbit", "fp32"), (2, "none", "fp32"))
    found.append(target("hosts_waiting_10g", waits, 1.05, "lower"))
    return found


def rank() -> None:
    who, shape, precision, tokens, micro_batches, steps = sys.argv[2:8]
    quiet()
    import torch
    import torch.distributed as dist

    from aliquot.distributed.topology import Topology

    number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work, config = Work(int(tokens), int(micro_batches)), llama_config(SHAPES[shape])
    marks, sent = [], []

    def mark(_: object = None) -> None:
        dist.barrier()
        marks.append((time.perf_counter(), time.process_time(), time.thread_time()))
        if len(marks) in (UNTIMED - 1, int(steps)):
            sent.append(sent_when_still(INTERFACE))
            dist.barrier()

    if who == "deepspeed":
        deepspeed_seconds(config, lambda _: (work.tokens, work.tokens), work.rows, int(steps), mark, precision)
    else:
        if who == "fsdp2":
            making = fsdp2_steps(config, work, precision)
        else:
            settings = {"reduce_dtype": who, "micro_batches": work.rows}
            topology = Topology(number, world_size, number, world_size, 0, 1, "cpu", 1, ())
            making = aliquot_steps("host", config, work, topology, settings, precision, LEARNING_RATE)  # type: ignore[arg-type]
        for _ in range(int(steps)):
            next(making)
            mark()
    timed = marks[UNTIMED - 1 :]
    (began, of_all, of_own), (ended, all_ended, own_ended) = timed[0], timed[-1]
    tell({
        "seconds": [b[0] - a[0] for a, b in pairwise(timed)],
        "sent": (sent[1] - sent[0]) / len(timed),
        # Processor seconds per second of all threads except the computing thread.
        "helping": ((all_ended - of_all) - (own_ended - of_own)) / (ended - began),
    })  # fmt: skip
    os._exit(0)


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
