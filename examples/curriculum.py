"""A curriculum that the model chooses: each step trains the documents that are neither learned already nor too hard.

python examples/curriculum.py CONFIG TEXTS.jsonl [KEY=VALUE ...]

TEXTS has records {"text": TEXT}. In each step, the model computes the loss of 32 documents, and learns the 16 in the
middle. What it has seen is saved with the weights, so that a resumed run continues with other documents.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import aliquot

POOL, BATCH, LONGEST = 32, 16, 128


def main(file: str, texts: str, *overrides: str) -> None:
    config = aliquot.read_config(file, overrides)
    with aliquot.Trainer(config) as trainer:
        documents = [json.loads(line)["text"] for line in Path(texts).read_text().splitlines()]
        ids = [trainer.tokenizer.encode(document)[:LONGEST] for document in documents]
        sequences = [aliquot.TokenSequence(tokens) for tokens in ids if len(tokens) > 1]
        seen = trainer.state.setdefault("seen", [0] * len(sequences))
        for step in trainer.steps():
            order = random.Random(step).sample(range(len(sequences)), len(sequences))
            pool = sorted(order, key=lambda index: seen[index])[:POOL]  # the documents that were trained least
            logprobs = trainer.forward([sequences[index] for index in pool], scatter=True)
            losses = dict(zip(pool, (-values.mean().item() for values in logprobs), strict=True))
            edge = (len(pool) - min(BATCH, len(pool))) // 2
            chosen = sorted(pool, key=losses.__getitem__)[edge : edge + BATCH]
            trainer.forward_backward([sequences[index] for index in chosen], scatter=True)
            trainer.optim_step()
            for index in chosen:
                seen[index] += 1
            trainer.log(pool_loss=sum(losses.values()) / len(losses))
        trainer.export()


if __name__ == "__main__":
    main(*sys.argv[1:])
