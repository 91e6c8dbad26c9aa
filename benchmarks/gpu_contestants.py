"""Training steps of aliquot and its peers on one GPU, on the same rows of documents.

A step has rows of packed documents, AdamW and clipping at 1. Peers are set up as their documentation recommends.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from aliquot.machine.device_copies import send
from benchmarks.contestants import Work, aliquot_steps, trainer_arguments

Between = Callable[[int], None]  # called after each optimizer step


def documents(config: Mapping[str, Any], work: Work, index: int) -> dict[str, torch.Tensor]:
    """Return row `index` as packing passes it to transformers, each tensor int64 [T].

    Positions restart at each document. labels[i] belongs to token i; nothing predicts the first token of a document.
    """
    edges = work.edges(index)
    ids = torch.randint(0, config["vocab_size"], (edges[-1],), generator=torch.Generator().manual_seed(index))
    labels = ids.clone()
    labels[list(edges[:-1])] = -100
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def ours(config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str, between: Between) -> None:
    # As engines/select.py selects.
    _aliquot("fsdp" if offload else "single_gpu", config, work, device, offload, recompute, between)


def with_flash(
    kernel: str, config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str, between: Between
) -> None:
    """Train with FlashAttention 3 or 4 instead of the kernel of torch."""
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl(kernel)
    ours(config, work, device, offload, recompute, between)


def sharded(
    config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str, between: Between
) -> None:
    """Train with the engine of several GPUs, whose collectives have one rank here."""
    _aliquot("fsdp", config, work, device, offload, recompute, between)


def offloaded(
    config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str, between: Between
) -> None:
    """Train with shard.offload: cpu, through pinned memory."""
    _aliquot("fsdp", config, work, device, True, recompute, between)


def host(config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str, between: Between) -> None:
    """Train with engine host: the GPU has the weights, and the CPU all other states."""
    _aliquot("host", config, work, device, False, recompute, between)


def copied(config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str, between: Between) -> None:
    """Train with engine host on a GPU that has room for three layers: the others cross PCIe for each use."""
    _aliquot("copied", config, work, device, False, recompute, between)


def in_fp8(config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str, between: Between) -> None:
    """Train with train.fp8."""
    _aliquot("fp8", config, work, device, False, recompute, between)


def _aliquot(
    engine: str, config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str, between: Between
) -> None:
    from aliquot.distributed.topology import Topology
    from aliquot.engines.engine_plan import Unsharded

    settings = {
        "offload": offload and device == "cuda",
        "copies_weights": engine in ("host", "copied"),
        "copied_layers": config["num_hidden_layers"] if engine == "copied" else 0,
        "fp8": engine == "fp8",
        "gradient_checkpointing": recompute,
        "compile": "layers" if device == "cuda" else "none",
        "unsharded": Unsharded(weights=not offload, gradients=not offload and work.rows > 1),
    }
    topology = Topology(0, 1, 0, 1, 0, 1, device, torch.get_num_threads(), ())  # type: ignore[arg-type]
    name = {"fp8": "single_gpu", "copied": "host"}.get(engine, engine)
    _until_told(aliquot_steps(name, config, work, topology, settings), between)


def fsdp2(config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str, between: Between) -> None:
    """Train as torchtitan: fp32 master weights, bf16 compute, each layer compiled and wrapped, flex_attention."""
    _until_told(_fsdp2(config, work, device, offload, recompute), between)


def _fsdp2(config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str) -> Iterator[None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = _transformers(config, "flex_attention" if device == "cuda" else "sdpa", torch.float32)
    if recompute != "none":
        model.gradient_checkpointing_enable()
    mesh = init_device_mesh(device, (1,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = CPUOffloadPolicy() if offload and device == "cuda" else OffloadPolicy()
    reshard = None if offload else False  # keep weights whole within a step, as aliquot does
    for layer in model.model.layers:
        if device == "cuda":
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    index = 0
    while True:
        for _ in range(work.rows):
            row = {
                name: send(values[None], torch.device(device))
                for name, values in documents(config, work, index).items()
            }
            (model(**row, use_cache=False).loss / work.rows).backward()
            index += 1
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def trainer(
    config: Mapping[str, Any],
    work: Work,
    device: str,
    offload: bool,
    recompute: str,
    between: Between,
    zero3: dict[str, Any] | None = None,
) -> None:
    """Train with HF Trainer: flash attention over packed rows if flash_attn is installed, else torch's SDPA."""
    from transformers import Trainer, TrainerCallback, default_data_collator

    if offload and zero3 is None:
        raise SystemExit("HF Trainer by itself has no offload")

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return documents(config, work, index)

    class Between(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            between(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        more: dict[str, Any] = {"gradient_checkpointing": recompute != "none", "train_sampling_strategy": "sequential"}
        if zero3 is not None:
            file = Path(folder, "zero3.json")
            file.write_text(json.dumps(zero3))
            more["deepspeed"] = str(file)
        settings = trainer_arguments(folder, "bf16", 1_000_000, 1, work.rows, use_cpu=device == "cpu", **more)
        flash = "flash_attention_2" if device == "cuda" and find_spec("flash_attn") is not None else "sdpa"
        model = _transformers(config, flash, torch.float32)
        Trainer(
            model=model, args=settings, train_dataset=Rows(), data_collator=default_data_collator, callbacks=[Between()]
        ).train()


def zero3(config: Mapping[str, Any], work: Work, device: str, offload: bool, recompute: str, between: Between) -> None:
    """Train with HF Trainer and DeepSpeed ZeRO-3, which chooses all of its settings itself."""
    import os

    os.environ["DS_ACCELERATOR"] = device
    import deepspeed

    # Reuses the existing group.
    deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo")
    away = {"device": "cpu", "pin_memory": True}
    stage3: dict[str, Any] = {"stage": 3, "overlap_comm": device == "cuda"}
    if offload and device == "cuda":
        stage3 |= {"offload_optimizer": away, "offload_param": away}
    settings = {
        "bf16": {"enabled": True},
        "zero_optimization": stage3,
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    trainer(config, work, device, offload, recompute, between, settings)


CONTESTANTS: dict[str, Callable[..., None]] = {
    "aliquot": ours,
    "aliquot, sharded": sharded,
    "aliquot, offloaded": offloaded,
    "aliquot, engine host": host,
    "aliquot, copied layers": copied,
    "FSDP2 + flex_attention": fsdp2,
    "HF Trainer": trainer,
    "DeepSpeed ZeRO-3": zero3,
}
if find_spec("torchao") is not None:
    CONTESTANTS["aliquot, fp8"] = in_fp8
# Kernels that torch can put into the place of its own, and the modules that they need.
FLASH_MODULES = {"FA3": ("flash_attn_interface",), "FA4": ("flash_attn", "flash_attn.cute")}
CONTESTANTS |= {
    f"aliquot, {kernel}": partial(with_flash, kernel)
    for kernel, modules in FLASH_MODULES.items()
    if all(find_spec(module) is not None for module in modules)
}


def _transformers(config: Mapping[str, Any], attention: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoConfig.for_model(**config)
    return AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=attention)


def _until_told(steps: Iterator[None], between: Between) -> None:
    """Run until `between` raises an exception."""
    for step, _ in enumerate(steps, 1):
        between(step)
