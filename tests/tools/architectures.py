"""Every model type of transformers' causal language models, trained for two steps, against a plain loop.

    python -m tests.tools.architectures [--types llama,gpt2] [--json FILE] [--quick]

Each is made small from its own configuration class, with the defaults of everything else, and trained in fp32 by the
engines host (1 and 2 ranks) and fsdp (2 ranks) on packed documents of up to 300 tokens. The plain loop runs the eager
attention of transformers on the same initial weights, one document at a time, and updates by torch.optim.AdamW.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aliquot.config.schema import ModelSection
from aliquot.core.errors import UserError
from aliquot.distributed.topology import Topology
from aliquot.engines.base import Engine, EngineSpec
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.host.host_engine import HostEngine
from aliquot.engines.startup_proof import prove
from aliquot.models import initialize, meta
from aliquot.models.micro_batch import MicroBatch
from aliquot.models.narrow import has_dropout, narrow, without_dropout
from aliquot.models.source import resolve
from aliquot.models.traits import Traits, traits
from tests import plain

# What a configuration cannot be without, and has no default that its own model takes.
REQUIRED: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "xmod": {"default_language": "en_XX"},
    "big_bird": {"attention_type": "original_full"},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
}
LENGTHS = ((7, 23, 2, 41), (300,), (5, 64, 1, 17, 90), (33, 3))  # documents of each micro-batch
RUNS = (("host", 1), ("host", 2), ("fsdp", 2))
STEPS, RATE, SEED, TIMEOUT_S = 2, 1e-3, 3, 120
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Outcome:
    """`verdict`: exact, refused or wrong; `road`: packed or a call each; `line`: why it is not exact."""

    type: str
    verdict: str
    road: str = ""
    line: str = ""
    error: float = 0.0  # the largest relative one of losses and norms
    seconds: float = 0.0


def micro_batches(config: Any) -> list[MicroBatch]:
    text = config.get_text_config(decoder=True)
    vocabulary, longest = int(text.vocab_size), getattr(text, "max_position_embeddings", None) or LENGTHS[1][0]
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number, wanted in enumerate(LENGTHS):
        lengths = [min(length, longest - 8) for length in wanted]
        documents = [torch.randint(4, vocabulary, (length,), generator=generator) for length in lengths]
        labels = [torch.cat([document[1:], torch.tensor([-100])]) for document in documents]
        edges = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
        positions = torch.cat([torch.arange(length) for length in lengths])
        calls = max(map(len, LENGTHS))
        batches.append(MicroBatch(torch.cat(documents), torch.cat(labels), positions, tuple(edges), number, calls))
    return batches


def small_config(model_type: str, dropout: bool) -> Any:
    """Raises UserError as a run would."""
    full = resolve(ModelSection(config={"model_type": model_type, **REQUIRED.get(model_type, {})})).config
    values = narrow(full if dropout else without_dropout(full)).to_dict()
    return resolve(ModelSection(config=values)).config


def reference(config: Any) -> dict[str, Any]:
    """The plain loop: losses and norms of each step."""
    weights = plain.initial_weights(config, SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(plain.parameter_groups(learns, 0.1), lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    batches = micro_batches(config)
    predicted = sum(batch.predicted for batch in batches)
    losses, norms = [], []
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            for start, stop in pairwise(batch.edges):
                if stop - start > 1:
                    logits = model(input_ids=batch.input_ids[None, start:stop], use_cache=False).logits[0].float()
                    loss = nn.functional.cross_entropy(logits, batch.labels[start:stop], reduction="sum") / predicted
                    loss.backward()
                    total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "norms": norms}


def ours(config: Any, known: Traits, engine_name: str, rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    built = meta.build(config, known)
    spec = EngineSpec(
        "fp32", 512, built.traits.plain_head, built.traits.packs, built.traits.looks_up, built.dropout,
        weight_decay=0.1, adam_beta2=0.95, collectives="shared_memory",
    )  # fmt: skip
    topology = Topology(rank, world_size, rank, world_size, 0, 1, "cpu", 1, ())
    kind: type[Engine] = HostEngine if engine_name == "host" else FsdpEngine
    if world_size > 1:
        prove(config, built.traits, kind, spec, topology)
    engine = kind.build(built.model, spec, topology)
    initialize.initialize(engine, built.fills, SEED)
    engine.ready()
    batches = micro_batches(config)
    if built.traits.packs:
        batches = [replace(batch, calls=0) for batch in batches]
    predicted = sum(batch.predicted for batch in batches)
    losses, norms = [], []
    for _ in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        own = batches[rank::world_size]
        for number, batch in enumerate(own):
            total += float(engine.backward(batch, 1 / predicted, last=number == len(own) - 1))
        dist.all_reduce(total)
        losses.append(float(total) / predicted)
        norms.append(engine.step(RATE, math.inf))
    engine.close()
    return {"losses": losses, "norms": norms}


def forked(work: Any, count: int, folder: Path) -> list[dict[str, Any]]:
    """What `work(rank)` returns in so many processes; {"refused": line} or {"failed": line} where it raises."""
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            _answer(work, rank, folder)
        children.append(child)
    until = time.monotonic() + TIMEOUT_S
    waiting = set(children)
    while waiting and time.monotonic() < until:
        ended = {child for child in waiting if os.waitpid(child, os.WNOHANG)[0]}
        waiting -= ended
        found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
        if any("failed" in each or "refused" in each for each in found):
            break
        time.sleep(0.005)
    for child in waiting:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    answers = [folder / f"{rank}.json" for rank in range(count)]
    return [json.loads(file.read_text()) if file.exists() else {"failed": "no answer"} for file in answers]


def _answer(work: Any, rank: int, folder: Path) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    try:
        answer = work(rank)
    except UserError as error:
        answer = {"refused": str(error)}
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = " ".join(str(error).split())[:200]
        answer = {"failed": f"{type(error).__name__}: {line} ({Path(where.filename).name}:{where.lineno})"}
    beside = folder / f"{rank}.tmp"
    beside.write_text(json.dumps(answer))
    beside.rename(folder / f"{rank}.json")
    os._exit(0)


def _rank(config: Any, known: Traits, engine: str, rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    return ours(config, known, engine, rank, world_size)


def judge(model_type: str, runs: tuple[tuple[str, int], ...] = RUNS) -> Outcome:
    begun = time.monotonic()

    def outcome(verdict: str, **values: Any) -> Outcome:
        return Outcome(model_type, verdict, seconds=round(time.monotonic() - begun, 1), **values)

    with tempfile.TemporaryDirectory() as scratch:

        def run(work: Any, count: int, name: str) -> list[dict[str, Any]]:
            folder = Path(scratch, name)
            folder.mkdir()
            return forked(lambda rank: work(rank, folder), count, folder)

        def prepare(_rank: int, _folder: Path) -> dict[str, Any]:
            torch.set_num_threads(1)
            config, dropping = small_config(model_type, dropout=False), small_config(model_type, dropout=True)
            found, dropped = traits(config), traits(dropping) if has_dropout(dropping) else None
            return {"traits": vars(found), "dropped": dropped and vars(dropped), **reference(config)}

        def trained(engine: str, world_size: int, dropout: bool, known: dict[str, Any]) -> list[dict[str, Any]]:
            def train(rank: int, folder: Path) -> dict[str, Any]:
                return _rank(small_config(model_type, dropout), Traits(**known), engine, rank, world_size, folder)

            return run(train, world_size, f"{engine}-{world_size}-{dropout}")

        (expected,) = run(prepare, 1, "plain")
        if "refused" in expected:
            return outcome("refused", line=expected["refused"])
        if "failed" in expected:
            return outcome("wrong", line=f"plain loop: {expected['failed']}")
        road, worst = "a call each" if expected["traits"]["why_unpacked"] else "packed", 0.0
        for engine, world_size in runs:
            name, found = f"{engine} on {world_size}", trained(engine, world_size, False, expected["traits"])
            lines = [line for each in found for line in (each.get("refused"), each.get("failed")) if line]
            if lines:
                return outcome("wrong", road=road, line=f"{name}: {max(lines, key=len)}")
            worst = max(worst, *(_difference(each, expected) for each in found))
            if not worst <= TOLERANCE:
                return outcome("wrong", road=road, error=worst, line=f"{name}: {found[0]}")
        if expected["dropped"]:
            alone, (first, *_) = (trained("host", count, True, expected["dropped"]) for count in (1, 2))
            if "losses" not in alone[0] or "losses" not in first:
                return outcome("wrong", road=road, line=f"with dropout: {alone[0]} {first}")
            error = _difference(first, alone[0])
            if error > TOLERANCE or first["losses"][0] == expected["losses"][0]:
                return outcome("wrong", road=road, error=error, line="dropout is not the same on 1 and on 2 ranks")
            road = f"{road}, dropout"
        return outcome("exact", road=road, error=worst)


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative one of all losses and of the first gradient's norm.

    Where a gradient is zero but for rounding (of a key's bias), AdamW makes whole steps of the noise: the second norm
    tells of that.
    """
    pairs = [*zip(found["losses"], expected["losses"], strict=True), (found["norms"][0], expected["norms"][0])]
    error = max(abs(a - b) / abs(b) for a, b in pairs)
    return error if math.isfinite(error) else math.inf


def quiet() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="only these, separated by commas")
    parser.add_argument("--json", type=Path, help="write all outcomes there")
    parser.add_argument("--quick", action="store_true", help="one rank of engine host, or two of fsdp, in turn")
    arguments = parser.parse_args()
    quiet()
    types = arguments.types.split(",") if arguments.types else list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    outcomes = []
    for number, model_type in enumerate(types):
        found = judge(model_type, RUNS[2 * (number % 2) :][:1] if arguments.quick else RUNS)
        outcomes.append(found)
        told = f"{found.type:26} {found.verdict:8} {found.road:20} {found.error:7.0e} {found.seconds:5.1f} s"
        print(f"{told}  {found.line[:150]}", flush=True)
    counts = {verdict: sum(each.verdict == verdict for each in outcomes) for verdict in ("exact", "refused", "wrong")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(each) for each in outcomes], indent=1) + "\n")
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
