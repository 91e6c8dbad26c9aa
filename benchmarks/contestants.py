"""Training steps of aliquot and its peers on the same work, for one rank of two.

A step has some micro-batches per rank, AdamW and clipping at 1. Peers are set up as their documentation recommends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

# The JSON of HF Trainer and DeepSpeed jobs on CPU nodes, without their printing.
DEEPSPEED_JSON = json.loads((Path(__file__).parents[1] / "examples" / "seed" / "cpu-ds.json").read_text()) | {
    "steps_per_print": 1_000_000
}
LEARNING_RATE = 1e-4  # default
LARGEST_NUMEL = 40_000_000  # largest weight of the benchmarks; by default five buffers hold 100 million elements each
_STILL_BYTES = 100_000  # in half a second: waiting ranks send heartbeats
AIO = {"block_size": 8 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True}


PRECISIONS = ("auto", "bf16", "fp32")


def chosen_precision(option: str) -> str:
    """Return the precision that `train.precision: OPTION` chooses on this machine."""
    from aliquot.machine.matmul import faster_precision_here

    return faster_precision_here("cpu") if option == "auto" else option


@dataclass(frozen=True)
class Work:
    """`rows` micro-batches of `tokens` tokens per rank and step; `mean` document length, or None for full sequences."""

    tokens: int
    rows: int
    mean: int | None = None

    def edges(self, seed: int) -> tuple[int, ...]:
        if self.mean is None:
            return tuple(range(0, self.tokens + 1, min(512, self.tokens)))
        draw, edges = random.Random(seed), [0]
        while edges[-1] < self.tokens:
            edges.append(min(self.tokens, edges[-1] + max(2, int(draw.expovariate(1 / self.mean)))))
        return tuple(edges)


def aliquot_steps(
    engine_name: str,
    config: Mapping[str, Any],
    work: Work,
    topology: Any,
    settings: Mapping[str, Any],
    precision: Literal["bf16", "fp32"] = "bf16",
    learning_rate: float = LEARNING_RATE,
    adapter: Any = None,
) -> Iterator[None]:
    """Make an iterator whose `next` runs one optimizer step of engine host, fsdp or single_gpu.

    `adapter` is as in a run's config; the base model then has small random numbers.
    """
    from transformers import AutoConfig

    from aliquot.engines.base import EngineSpec
    from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
    from aliquot.engines.fsdp.single_gpu_engine import SingleGpuEngine
    from aliquot.engines.host.host_engine import HostEngine
    from aliquot.machine.allocator import tune_glibc
    from aliquot.models import initialize, meta
    from aliquot.models.micro_batch import MicroBatch

    tune_glibc()
    built = meta.build(AutoConfig.for_model(**config), adapter=adapter)
    base: dict[str, Any] = {"base": "bf16" if adapter is None else adapter.base, "compressed": built.compressed}
    spec = EngineSpec(precision, work.tokens, built.traits.plain_head, **base, **settings)
    engines: dict[str, Any] = {"host": HostEngine, "fsdp": FsdpEngine, "single_gpu": SingleGpuEngine}
    engine = engines[engine_name].build(built.model, spec, topology)
    initialize.initialize(engine, built.fills, 1)
    for part in engine.parts() if adapter is not None else ():
        if part.name not in built.learned:
            for start in range(part.start, part.stop, 1 << 22):  # no block is larger when a checkpoint is read
                engine.write(part, start, torch.randn(min(1 << 22, part.stop - start)) * 0.02)
    engine.ready()
    step = 0
    while True:
        for row in range(work.rows):
            seed = (step * work.rows + row) * topology.world_size + topology.rank
            edges = work.edges(seed)
            ids = torch.randint(0, config["vocab_size"], (edges[-1],), generator=torch.Generator().manual_seed(seed))
            labels = ids.roll(-1)
            labels[torch.tensor(edges[1:]) - 1] = -100
            positions = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])
            batch = MicroBatch(ids, labels, positions, edges)
            engine.backward(batch, 1 / (work.tokens * work.rows * topology.world_size), row == work.rows - 1)
        engine.step(learning_rate, 1.0)
        step += 1
        yield


def fsdp2_steps(config: Mapping[str, Any], work: Work, precision: str = "bf16") -> Iterator[None]:
    """Make steps as in PyTorch's tutorial: fp32 master weights, bf16 compute, each layer and the model wrapped."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    compute = torch.bfloat16 if precision == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    while True:
        for _ in range(work.rows):
            ids = torch.randint(0, config["vocab_size"], (1, work.tokens))
            (model(input_ids=ids, labels=ids, use_cache=False).loss / work.rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def deepspeed_seconds(
    config: Mapping[str, Any],
    lengths: Callable[[int], tuple[int, int]],
    accumulation: int,
    steps: int,
    between: Callable[[int], None],
    precision: str = "bf16",
    rows: int = 1,
    nvme: Path | None = None,
) -> None:
    """Run HF Trainer with the seed's ZeRO-3 JSON, and call `between(step)` after each optimizer step.

    Args:
        lengths: returns the real tokens of row `index`, and the row's length with padding.
        accumulation: micro-batches per step.
        rows: rows per micro-batch.
        nvme: a directory for weights and states; activations are then recomputed.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback

    from aliquot.engines.deepspeed.deepspeed_setup import prepare_ops

    prepare_ops()
    deepspeed.init_distributed(dist_backend="gloo")  # reuses the existing group

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            real, padded = lengths(index)
            ids = torch.randint(0, config["vocab_size"], (padded,), generator=torch.Generator().manual_seed(index))
            labels, mask = ids.clone(), torch.ones_like(ids)
            labels[real:], mask[real:] = -100, 0
            return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    class Between(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            between(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cpu-ds.json")
        said = DEEPSPEED_JSON | {"bf16": {"enabled": precision == "bf16"}}
        if nvme is not None:
            there = {"device": "nvme", "nvme_path": str(nvme)}
            offloaded = {"offload_optimizer": there, "offload_param": there | {"buffer_size": LARGEST_NUMEL}}
            said |= {"zero_optimization": said["zero_optimization"] | offloaded, "aio": AIO}
        file.write_text(json.dumps(said))
        settings = trainer_arguments(
            folder, precision, steps, rows, accumulation, deepspeed=str(file), gradient_checkpointing=nvme is not None
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        Trainer(model=model, args=settings, train_dataset=Rows(), callbacks=[Between()]).train()


def trainer_arguments(
    folder: str, precision: str, steps: int, batch: int, accumulation: int, kind: Any = None, **more: Any
) -> Any:
    """Return arguments of an HF Trainer that saves, logs and reports nothing; `kind`: a class of TRL's arguments."""
    from transformers import TrainingArguments

    return (kind or TrainingArguments)(
        output_dir=folder,
        bf16=precision == "bf16",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        max_grad_norm=1.0,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        **{"use_cpu": True, **more},
    )


def matmul_rate(
    shapes: list[tuple[int, int, int]],
    seconds: float = 0.3,
    clock: Callable[[], float] = time.perf_counter,
    precision: str = "bf16",
) -> float:
    """Return FLOP/s of this rank's matmul while all ranks multiply: the best of `shapes` (M, K, N)."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    rates = []
    for m, k, n in shapes:
        left, right = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
        out = torch.empty(m, n, dtype=dtype)
        torch.mm(left, right, out=out)
        times: list[float] = []
        while sum(times) < seconds:
            began = clock()
            torch.mm(left, right, out=out)
            times.append(clock() - began)
        rates.append(2 * m * k * n / sorted(times)[len(times) // 2])
    return max(rates)


def sent_bytes(device: str = "lo") -> int:
    """Return the bytes sent over a device of this network namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    return 0


def sent_when_still(device: str) -> int:
    """Return `sent_bytes` when the link is quiet, because a step of aliquot ends while weights are still being sent."""
    before, found = -_STILL_BYTES, sent_bytes(device)
    while found > before + _STILL_BYTES:
        time.sleep(0.5)
        before, found = found, sent_bytes(device)
    return found


def quiet() -> None:
    """Silence the logs of peers on standard error, so that the last line names the reason of a failure."""
    sys.stdout.flush()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
