"""GRPO: teach a model of stories, by a reward that a function computes, to tell short and happy stories with a dog.

python examples/grpo.py examples/grpo.yaml model.path=MODEL data.path=STORIES [KEY=VALUE ...]
torchrun --nproc-per-node 2 examples/grpo.py examples/grpo.yaml model.path=MODEL data.path=STORIES

In each step, the model continues 8 beginnings of stories 8 times. A sample's advantage is its reward relative to the
other samples of its group. The loss is PPO's, plus a penalty for the distance to the model before training.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
from pathlib import Path

from torch import Tensor

import aliquot

GROUPS, COPIES, MAX_TOKENS = 8, 8, 120
PROMPT_WORDS = 6
KL_WEIGHT = 0.1
HELD_OUT = 32  # prompts
HAPPY = re.compile(r"\b(fun|glad|happ(y|ily)|hugg(ed|ing)|joy|laugh(ed|ing)?|love[ds]?|proud|smil(ed?|ing))\b", re.I)

clipped = aliquot.losses.ppo()


def reward(text: str) -> float:
    """Return a third each for a happy last sentence, for at most 80 words and an end, and for a dog."""
    sentences = [sentence for sentence in re.split(r"(?<=[.!?])\s+", text.strip()) if sentence]
    is_happy = bool(sentences) and HAPPY.search(sentences[-1]) is not None
    is_short = len(text.split()) <= 80 and text.rstrip().endswith((".", "!", "?", '"'))
    return (is_happy + is_short + (re.search(r"\bdog\b", text, re.I) is not None)) / 3


def loss(logprobs: Tensor, sequence: aliquot.TokenSequence) -> Tensor:
    """Return PPO's loss plus the divergence from the reference by the estimator of Schulman (2020), k3."""
    ratio = sequence["reference"] - logprobs
    return clipped(logprobs, sequence) + KL_WEIGHT * (ratio.exp() - ratio - 1).sum()


def advantages(rewards: list[float]) -> list[float]:
    """Return the rewards of a group, with mean 0 and standard deviation 1."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(value - mean) / (deviation + 1e-4) for value in rewards]


def beginnings(stories: Path) -> list[str]:
    """Return the first words of each story."""
    texts = [json.loads(line)["text"].split() for line in stories.read_text().splitlines()]
    return [" ".join(words[:PROMPT_WORDS]) for words in texts if len(words) > PROMPT_WORDS]


def mean_reward(trainer: aliquot.Trainer, prompts: list[str]) -> float:
    """Return the mean reward of two samples of each prompt, which are the same samples at every call."""
    return statistics.fmean(reward(s.text) for s in trainer.sample(prompts, n=2, max_tokens=MAX_TOKENS, seed=-1))


def main() -> None:
    config = aliquot.read_config(sys.argv[1], sys.argv[2:])
    prompts = beginnings(Path(str(config.data.path)))
    held_out, prompts = prompts[-HELD_OUT:], prompts[:-HELD_OUT]
    with aliquot.Trainer(config) as trainer:
        trainer.state.setdefault("reward", mean_reward(trainer, held_out))
        for step in trainer.steps():
            chosen = random.Random(step).sample(prompts, GROUPS)
            samples = trainer.sample(chosen, n=COPIES, max_tokens=MAX_TOKENS, seed=step)
            rewards = [reward(sample.text) for sample in samples]
            values = [a for at in range(0, len(rewards), COPIES) for a in advantages(rewards[at : at + COPIES])]
            references = trainer.forward([sample.sequence() for sample in samples], reference=True, scatter=True)
            sequences = [
                sample.sequence(advantages=value, reference=logprobs.tolist())
                for sample, value, logprobs in zip(samples, values, references, strict=True)
            ]
            trainer.forward_backward(sequences, loss, scatter=True)
            trainer.optim_step()
            trainer.log(reward=statistics.fmean(rewards))
        before, after = trainer.state["reward"], mean_reward(trainer, held_out)
        trainer.export()
    if trainer.ranks.rank == 0:
        print(f"mean reward of held-out prompts: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    try:
        main()
    except aliquot.UserError as error:
        sys.exit(f"aliquot: {error.line}")
