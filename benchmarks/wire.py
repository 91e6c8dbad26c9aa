"""Count the bytes sent in one optimizer step by two ranks, on one host and on two (network namespaces; needs root).

python benchmarks/wire.py --json wire.json

The model has 125 M parameters and four micro-batches of 512 tokens per rank and step. Counting begins at step 9,
because Adam moves every weight of a new model by the learning rate in its first steps, and engine `host` sends changes.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.multinode.namespaces import INTERFACE, switched_hosts, why_not

from benchmarks import smoke
from benchmarks.contestants import Work, aliquot_steps, deepspeed_seconds, quiet, sent_when_still
from benchmarks.layouts import LLAMA_125M, llama_config
from benchmarks.report import Row, finish, target
from benchmarks.worlds import run_world, tell

RANKS = 2
STEPS, COUNTED = smoke.choose((12, 4), (4, 1))
WORK = Work(512, 4)
MODEL = smoke.choose(LLAMA_125M, smoke.TINY)
WHO = {"aliquot host": "host", "aliquot fsdp": "fsdp", "HF Trainer + DeepSpeed ZeRO-3": "deepspeed"}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    given = smoke.parse(arguments)
    rows: list[Row] = []
    for name, who in WHO.items():
        row: Row = {"who": name, "one_host_mb": mb(run_world(__file__, RANKS, who, "lo"), on_one=True)}
        row["two_hosts_mb"] = None
        if why_not() is None:
            with switched_hosts(2) as hosts:
                environ = {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": INTERFACE}
                prefixes = [host.command() for host in hosts]
                found = run_world(__file__, RANKS, who, INTERFACE, environ=environ, prefixes=prefixes)
                row["two_hosts_mb"] = mb(found, on_one=False)
        rows.append(row)
        print(row, flush=True)
    targets = [
        target("loopback_mb", rows[0]["one_host_mb"], 1, "lower"),
        target("wire_mb_two_hosts", rows[0]["two_hosts_mb"], 800, "lower"),
    ]
    finish("bytes sent per optimizer step, 125 M parameters (MB, headers of the protocols included)", rows, targets,
           given.json)  # fmt: skip


def mb(ranks: list[dict[str, float]], on_one: bool) -> float | None:
    """Return MB sent. Loopback counts both ranks at once; between hosts, the ranks are added."""
    if "failed" in ranks[0]:
        print(ranks[0]["failed"])
        return None
    return (ranks[0]["sent"] if on_one else sum(rank["sent"] for rank in ranks)) / 1e6


def rank() -> None:
    who, device = sys.argv[2:4]
    quiet()
    import torch
    import torch.distributed as dist

    from aliquot.distributed.topology import Topology

    number = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config, steps, sent = llama_config(MODEL), count(), []

    def mark(_: object = None) -> None:
        dist.barrier()
        if next(steps) in (STEPS - COUNTED - 1, STEPS - 1):
            sent.append(sent_when_still(device))
            dist.barrier()

    if who == "deepspeed":
        deepspeed_seconds(config, lambda _: (WORK.tokens, WORK.tokens), WORK.rows, STEPS, mark)
    else:
        making = aliquot_steps(who, config, WORK, Topology(number, RANKS, number, RANKS, 0, 1, "cpu", 1, ()), {})
        for _ in range(STEPS):
            next(making)
            mark()
    tell({"sent": (sent[1] - sent[0]) / COUNTED})
    os._exit(0)


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
