"""Measure which bf16 weights a step changes, how many bits describe the changes, and the speed of encoding.

python benchmarks/patches.py --model MODEL_DIRECTORY --text FILE --json patches.json

The benchmark fine-tunes a pretrained model on one core at several learning rates, with fp32 master weights and bf16
weights that are the rounded master weights. For the last steps it reports the share of changed weights, the share of
these that changed by one unit in the last place, and the bits per weight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import smoke
from benchmarks.report import Row, finish, target

RATES = (1e-5, 2e-5, 1e-4, 5e-4)
TOKENS = 512
WARM_UP = smoke.choose(20, 1)  # steps until Adam's moments settle


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, required=not smoke.SMOKE)
    arguments.add_argument("--text", type=Path, required=not smoke.SMOKE)
    arguments.add_argument("--steps", type=int, default=5)
    given = smoke.parse(arguments, model=smoke.model, text=smoke.text, steps=1)
    rows = [measured(given.model, given.text, rate, given.steps) for rate in RATES]
    speeds = [target(f"{name}_gb_s", rows[1][f"{name} GB/s"], 1.5, "higher") for name in ("encode", "decode")]
    finish("what a step changes in bf16 weights", rows, speeds, given.json)


def measured(model_directory: Path, text: Path, rate: float, steps: int) -> Row:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from aliquot.distributed.collectives.weight_patch import WeightPatches, max_patch_bytes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    ids = torch.tensor(AutoTokenizer.from_pretrained(model_directory)(text.read_text()[:2_000_000])["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    patches, found = WeightPatches(), defaultdict(list)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    room = torch.empty(max_patch_bytes(max(weight.numel() for weight in weights)), dtype=torch.uint8)
    for step in range(WARM_UP + steps):
        row = ids[None, step * TOKENS : (step + 1) * TOKENS]
        model(input_ids=row, labels=row, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        before = [weight.detach().bfloat16().view(-1) for weight in weights]
        optimizer.step()
        optimizer.zero_grad()
        if step < WARM_UP:
            continue
        changed = by_one = told = 0
        seconds = {"encode": 0.0, "decode": 0.0}
        for old, weight in zip(before, weights, strict=True):
            new = weight.detach().bfloat16().view(-1)
            difference = new.view(torch.int16).int() - old.view(torch.int16).int()
            changed += int((difference != 0).sum())
            by_one += int((difference.abs() == 1).sum())
            began = time.perf_counter()
            size = patches.encode(old, new, room)
            encoded = time.perf_counter()
            patches.decode(room[:size], old, "weights")
            seconds["encode"] += encoded - began
            seconds["decode"] += time.perf_counter() - encoded
            assert torch.equal(old.view(torch.int16), new.view(torch.int16))
            told += size
        numel = sum(weight.numel() for weight in weights)
        found["changed %"].append(100 * changed / numel)
        found["of these by one %"].append(100 * by_one / changed)
        found["bits a weight"].append(8 * told / numel)
        for name, took in seconds.items():
            found[f"{name} GB/s"].append(2 * numel / took / 1e9)
    return {"rate": f"{rate:g}", **{name: statistics.median(values) for name, values in found.items()}}


if __name__ == "__main__":
    main()
