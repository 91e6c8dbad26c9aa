"""Distil a teacher into a smaller student, from the 8 most likely tokens of the teacher at each place, stored once.

python examples/distillation.py CONFIG TEACHER TEXTS.jsonl [KEY=VALUE ...]

CONFIG describes the student, which needs the teacher's tokenizer (data.tokenizer). TEXTS has records {"text": TEXT}.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import aliquot

TOP, BATCH, LONGEST = 8, 16, 128


def cross_entropy(logprobs: Tensor, sequence: aliquot.TokenSequence) -> Tensor:
    """Return the cross-entropy with the teacher's distribution over its most likely tokens; logprobs [L, 8]."""
    return -(sequence["teacher"].softmax(-1) * logprobs).sum()


@torch.no_grad()
def teach(teacher: str, texts: list[str]) -> list[aliquot.TokenSequence]:
    """Return each text with the teacher's most likely tokens at each place, and their log-probabilities."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(teacher), AutoTokenizer.from_pretrained(teacher)
    sequences = []
    for text in texts:
        ids = tokenizer.encode(text)[:LONGEST]
        if len(ids) > 1:
            values, tokens = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1).topk(TOP)
            nothing = [[0] * TOP]  # nothing predicts the first token
            arrays = {"teacher": nothing + values.float().tolist()}
            sequences.append(aliquot.TokenSequence(ids, None, arrays, nothing + tokens.tolist()))
    return sequences


def main(file: str, teacher: str, texts: str, *overrides: str) -> None:
    config, stored = aliquot.read_config(file, overrides), Path(f"{texts}.top{TOP}.pt")
    if not stored.exists():
        sequences = teach(teacher, [json.loads(line)["text"] for line in Path(texts).read_text().splitlines()])
        torch.save([vars(sequence) for sequence in sequences], stored)
    sequences = [aliquot.TokenSequence(**values) for values in torch.load(stored)]
    with aliquot.Trainer(config) as trainer:
        for step in trainer.steps():
            batch = random.Random(step).sample(sequences, min(BATCH, len(sequences)))
            trainer.forward_backward(batch, cross_entropy, scatter=True)
            trainer.optim_step()
        trainer.export()


if __name__ == "__main__":
    main(*sys.argv[1:])
