"""Sample ends of stories from a model: make pairs of a happy and another end, or count the happy ones.

python examples/happy_endings.py pairs MODEL STORIES > pairs.jsonl
python examples/happy_endings.py rate MODEL STORIES
python examples/happy_endings.py held-out MODEL STORIES > held-out.jsonl

STORIES is a text file of stories with a line <|endoftext|> between them. `pairs` leaves out the last 200 stories;
`rate` samples ends of these 200 alone, and `held-out` prints them. A prompt is a story without its last three
sentences. An end is happy if its last complete sentence has one of the words below.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HAPPY = re.compile(r"\b(fun|glad|happ(y|ily)|hugg(ed|ing)|joy|laugh(ed|ing)?|love[ds]?|proud|smil(ed?|ing))\b", re.I)
HELD_OUT = 200  # stories
LONGEST = 900  # characters of a story, for a model of 256 positions
PAIRS = 2  # of a prompt, at most
AT_ONCE = 64  # ends that are sampled at once


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=("pairs", "rate", "held-out"))
    arguments.add_argument("model", help="a model directory")
    arguments.add_argument("stories", type=Path)
    arguments.add_argument("--samples", type=int, default=4, help="ends of each prompt")
    arguments.add_argument("--prompts", type=int, help="use only so many prompts")
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    stories = [story.strip() for story in given.stories.read_text().split("<|endoftext|>") if story.strip()]
    stories = stories[:-HELD_OUT] if given.what == "pairs" else stories[-HELD_OUT:]
    if given.what == "held-out":
        print("\n".join(json.dumps({"text": story}) for story in stories))
        return
    prompts = [prompt for story in stories if (prompt := without_end(story))][: given.prompts]
    torch.manual_seed(given.seed)
    happy = total = 0
    for prompt, ends in sampled_ends(given.model, prompts, given.samples):
        chosen, rejected = ([end for end in ends if is_happy(end) == wanted] for wanted in (True, False))
        happy, total = happy + len(chosen), total + len(ends)
        if given.what == "pairs":
            for good, bad in list(zip(chosen, rejected, strict=False))[:PAIRS]:
                print(json.dumps({"prompt": prompt, "chosen": good, "rejected": bad}), flush=True)
    if given.what == "rate":
        print(f"{happy / total:.1%} of {total} ends are happy")


def without_end(story: str) -> str:
    """Return a story without its last three sentences; nothing if the story is too long."""
    sentences = re.split(r"(?<=[.!?])(?=\s)", story)
    return "".join(sentences[:-3]) if len(story) < LONGEST else ""


def is_happy(end: str) -> bool:
    sentences = re.findall(r"[^.!?]+[.!?]", end)
    return bool(sentences) and HAPPY.search(sentences[-1]) is not None


def sampled_ends(path: str, prompts: list[str], samples: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each prompt with `samples` ends of at most 60 tokens, sampled at temperature 1."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = sorted(prompts, key=len)  # a batch is padded to its longest prompt
    at_once = max(1, AT_ONCE // samples)
    for start in range(0, len(prompts), at_once):
        batch = prompts[start : start + at_once]
        inputs = tokenizer(batch, return_tensors="pt", padding=True, return_token_type_ids=False)
        stories = model.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            num_return_sequences=samples,
            max_new_tokens=60,
            eos_token_id=[tokenizer.bos_token_id, tokenizer.eos_token_id],  # either separates stories
            pad_token_id=tokenizer.pad_token_id,
        )
        texts = tokenizer.batch_decode(stories, skip_special_tokens=True)
        for number, prompt in enumerate(batch):
            yield prompt, [text[len(prompt) :] for text in texts[number * samples : (number + 1) * samples]]


if __name__ == "__main__":
    main()
