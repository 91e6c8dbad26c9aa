"""The plain single-process loop that aliquot is compared with: stock transformers, one document at a time, AdamW."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler

from aliquot.config.adapter_section import AdapterSection
from aliquot.config.schema import RunConfig, TrainSection
from aliquot.data.batches import Batches
from aliquot.data.prepare import prepare
from aliquot.models import initialize, meta
from aliquot.models.micro_batch import MicroBatch
from aliquot.tensor_io.code_sizes import CompressedFormat, code_bytes
from aliquot.tensor_io.parts import Part
from aliquot.tensor_io.weight_codes import codes_in


class Whole:
    """A store that owns every weight whole: what a single process would hold."""

    def __init__(self, tensors: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
        self.values = {name: torch.full(shape, float("nan")) for name, shape in tensors}

    def parts(self) -> list[Part]:
        return [Part(name, tuple(v.shape), "weight", 0, v.numel()) for name, v in self.values.items()]

    def write(self, part: Part, start: int, values: Tensor) -> None:
        self.values[part.name].view(-1)[start : start + values.numel()] = values

    def read(self, part: Part, start: int, out: Tensor) -> None:
        raise AssertionError("nothing reads here")


def initial_weights(config: Any, seed: int, adapter: AdapterSection | None = None) -> dict[str, Tensor]:
    built = meta.build(config)
    store = Whole(built.tensors)
    initialize.initialize(store, built.fills, seed)
    if adapter is None:
        return store.values
    with_adapter = meta.build(config, adapter=adapter)
    own = Whole(with_adapter.saved)
    initialize.initialize(own, with_adapter.fills, seed)
    held = [name for name, _ in with_adapter.tensors if name not in own.values]
    weights = {name: store.values[name.replace(".base_layer", "")] for name in held} | own.values
    if adapter.base != "bf16":
        weights |= {name: decoded(weights[name], adapter.base) for name in with_adapter.compressed}
    return weights


def decoded(values: Tensor, base: CompressedFormat) -> Tensor:
    """Return the values of a weight after compression."""
    codes = codes_in(torch.zeros(code_bytes(base, values.shape), dtype=torch.uint8), base, values.shape)
    codes.set_scales(codes.encode(0, values.flatten()))
    result = torch.empty(values.numel())
    codes.decode(0, result)
    return result.view(values.shape)


def save_llama(directory: Path, layers: int = 2) -> None:
    """Save a small Llama with fixed weights, large enough that its predictions differ."""
    torch.manual_seed(2)
    config = AutoConfig.for_model(
        "llama", vocab_size=300, hidden_size=32, intermediate_size=50, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def parameter_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    learned = {name: p for name, p in parameters.items() if p.requires_grad}
    # By the names of transformers' Trainer.get_decay_parameter_names.
    decaying = [n for n, p in learned.items() if p.ndim >= 2 and not re.search(r"bias|(layer|rms|[._])norm\b", n)]
    return [
        {"params": [learned[name] for name in decaying], "weight_decay": weight_decay},
        {"params": [p for name, p in learned.items() if name not in decaying], "weight_decay": 0.0},
    ]


def add_lora(model: nn.Module, adapter: AdapterSection) -> None:
    """By peft itself."""
    wanted = adapter.target_modules
    if wanted == "all-linear" and "moe" in str(getattr(model.config, "model_type", "")):
        wanted = ["q_proj", "k_proj", "v_proj", "o_proj"]
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters() if ".experts." in name}
    experts = [f"experts.{name}" for name in ("gate_up_proj", "up_proj", "down_proj") if name in names]
    settings = LoraConfig(
        r=adapter.r, lora_alpha=int(adapter.alpha), target_modules=wanted,
        target_parameters=experts if adapter.experts else None,
    )  # fmt: skip
    inject_adapter_in_model(settings, model)


def model_and_reference(config: RunConfig) -> tuple[nn.Module, nn.Module]:
    """Return the fp32 model of a config, with its new adapter if it has one, and a frozen copy of the base model."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    reference = deepcopy(model)
    if config.adapter is not None:
        add_lora(model, config.adapter)
        drawn = initial_weights(reference.config, config.run.seed, config.adapter)
        model.load_state_dict({n: values for n, values in drawn.items() if ".lora_" in n}, strict=False)
    return model, reference


def summed_loss(model: nn.Module, batch: MicroBatch | None) -> Tensor:
    """Of all documents of a micro-batch, each fed alone."""
    assert batch is not None
    losses = [torch.zeros(())]
    for start, stop in pairwise(batch.edges):
        labels = batch.labels[start:stop]
        if bool((labels != -100).any()):
            logits = model(input_ids=batch.input_ids[None, start:stop]).logits[0].float()
            losses.append(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return torch.stack(losses).sum()


def train(
    model: nn.Module,
    batches: Batches,
    settings: TrainSection,
    steps: int,
    summed: Callable[[nn.Module, MicroBatch | None], Tensor] = summed_loss,
    loraplus_lr_ratio: float = 1.0,
) -> list[float]:
    """Losses of `steps` optimizer steps of the run that `settings` describe."""
    decay = settings.weight_decay
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon,
    }
    if loraplus_lr_ratio == 1.0:
        groups = parameter_groups(dict(model.named_parameters()), decay)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **options)
    else:
        options |= {"loraplus_lr_ratio": loraplus_lr_ratio, "loraplus_weight_decay": decay}
        optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, **options)  # type: ignore[arg-type]
    kind = "constant_with_warmup" if settings.lr_scheduler_type == "constant" else settings.lr_scheduler_type
    scheduler = get_scheduler(kind, optimizer, settings.warmup_steps or 0, steps)
    losses = []
    for step in range(steps):
        batch = batches.step_batch(step, 0, 1)
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in batch.micro_batches:
            loss = summed(model, micro_batch) / batch.predicted
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses


def trl_log(kind: str, config: RunConfig, records: list[dict[str, Any]], **settings: Any) -> list[dict[str, float]]:
    """Return what TRL's DPOTrainer or KTOTrainer logs of each step of a config; every step takes all `records`."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    path, train = Path(str(config.model.path)), config.train
    tokenizer = prepare(config.data, path, 300).load_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(config.run.directory / "trl"), per_device_train_batch_size=len(records),
        max_steps=train.max_steps, learning_rate=train.learning_rate, lr_scheduler_type="constant", beta=train.beta,
        logging_steps=1, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        optim="adamw_torch", save_strategy="no", dataloader_pin_memory=False, disable_tqdm=True,
        weight_decay=train.weight_decay, adam_beta2=train.adam_beta2, adam_epsilon=train.adam_epsilon, **settings,
    )  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")(
        model, reference, arguments, train_dataset=Dataset.from_list(records), processing_class=tokenizer
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def perplexity(model: nn.Module, batches: Iterable[MicroBatch | None], predicted: int) -> float:
    with torch.no_grad():
        return math.exp(sum(float(summed_loss(model, batch)) for batch in batches) / predicted)
