"""Fine-tune a real chat model on a real task, and compare its answers before and after: loss, exact matches, hours.

git clone --depth 1 https://github.com/tldr-pages/tldr
python benchmarks/fine_tune.py --pages tldr/pages/common --json fine_tune.json [--model HUB-ID-OR-DIRECTORY]

The task is a shell command for a description in English, from the pages of tldr (CC BY 4.0): one chat for each example
of a page. 1,200 chats drawn with a fixed seed are trained on for one epoch, by `aliquot train` with the config that
is printed, on all cores. 200 other chats are held out: their commands and descriptions are never trained on, but
other examples of the same program may be. Answers are greedy, by plain transformers, from the model as published and
from the export. An answer matches if it equals the page's command, white space aside.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import smoke
from benchmarks.report import Row, finish

HELD_OUT = smoke.choose(200, 8)
SHOWN = 20
CONFIG = """\
run: {{name: shell}}
model: {{path: {model}}}
data: {{path: train.jsonl, eval_path: held-out.jsonl, sequence_length: 512}}
train:
  num_train_epochs: 1
  global_batch_size: 2
  learning_rate: 2e-4
  warmup_ratio: 0.1
  eval_steps: 40
  eval_on_start: true
"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pages", type=Path, required=not smoke.SMOKE, help="a directory of tldr pages")
    arguments.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    arguments.add_argument("--chats", type=int, default=1200)
    given = smoke.parse(arguments, pages=_smoke_pages, model=_smoke_model, chats=16)
    with tempfile.TemporaryDirectory(prefix="aliquot-fine-tune-") as folder:
        _fine_tune(given, Path(folder))


def _fine_tune(given: argparse.Namespace, folder: Path) -> None:
    model = str(Path(given.model).resolve()) if Path(given.model).is_dir() else given.model
    chats = sorted({chat for page in sorted(given.pages.glob("*.md")) for chat in chats_of_page(page.read_text())})
    random.Random(0).shuffle(chats)
    held_out = chats[:HELD_OUT]
    questions, commands = ({chat[column] for chat in held_out} for column in (0, 1))
    rest = [chat for chat in chats[HELD_OUT:] if chat[0] not in questions and chat[1] not in commands]
    for name, part in (("train", rest[: given.chats]), ("held-out", held_out)):
        lines = [
            json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": command}]})
            for question, command in part
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    config = CONFIG.format(model=model)
    (folder / "shell.yaml").write_text(config)
    print(config, flush=True)
    before = answers(model, [question for question, _ in held_out])
    start = time.monotonic()
    aliquot = Path(sys.executable).with_name("aliquot")
    subprocess.run([aliquot, "train", "shell.yaml"], cwd=folder, check=True)
    train_s = time.monotonic() - start
    run = folder / "runs" / "shell"
    after = answers(str(run / "export"), [question for question, _ in held_out])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [values["eval_loss"] for values in metrics if "eval_loss" in values]
    rows: list[Row] = [
        _row("before", losses[0], before, held_out),
        _row("after", losses[-1], after, held_out) | {"chats": len(rest[: given.chats]), "minutes": train_s / 60},
    ]
    rows += [
        {"who": "example", "question": question, "page": command, "before": old, "after": new}
        for (question, command), old, new in list(zip(held_out, before, after, strict=True))[:SHOWN]
    ]
    finish(f"fine-tuning {Path(given.model).name} on tldr pages", rows, [], given.json)


def chats_of_page(page: str) -> Iterator[tuple[str, str]]:
    """Yield (question, command) for each example of a tldr page. Placeholders lose their braces."""
    program = re.match(r"# (.+)", page)
    for description, command in re.findall(r"^- (.+):\n\n`(.+)`$", page, re.MULTILINE):
        command = re.sub(r"\{\{\[[^\]]+\|([^\]|]+)\]\}\}", r"\1", command)  # {{[-v|--verbose]}}: the long option
        command = re.sub(r"\{\{(.+?)\}\}", r"\1", command)
        plain = re.sub(r"\[(\w+)\]", r"\1", description)  # marks of a letter, as in "e[x]tract"
        if program and "`" not in command:
            yield f"{program[1]}: {plain[0].lower()}{plain[1:]}", command


@torch.inference_mode()
def answers(model: str, questions: list[str]) -> list[str]:
    """Return the greedy answer to each question, at most 48 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = []
    for start in range(0, len(questions), 20):
        chats = [[{"role": "user", "content": question}] for question in questions[start : start + 20]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        ids = network.generate(**inputs, max_new_tokens=smoke.choose(48, 4), do_sample=False)
        texts += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def _row(who: str, loss: float, texts: list[str], held_out: list[tuple[str, str]]) -> Row:
    pages = [command for _, command in held_out]
    pairs = [(" ".join(text.split()), " ".join(page.split())) for text, page in zip(texts, pages, strict=True)]
    return {
        "who": who,
        "held_out_loss": loss,
        "matches_percent": 100 * sum(text == command for text, command in pairs) / len(pairs),
        "similarity": sum(SequenceMatcher(None, *pair).ratio() for pair in pairs) / len(pairs),
    }


def _smoke_pages() -> Path:
    directory = smoke.model().parent / "pages"
    directory.mkdir()
    for number in range(30):
        command = f"copy{number} {{{{[-v|--verbose]}}}} {{{{file}}}}"
        (directory / f"{number}.md").write_text(f"# copy{number}\n\n- Copy a file to host {number}:\n\n`{command}`\n")
    return directory


def _smoke_model() -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smoke.model())
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(smoke.model())
    return str(smoke.model())


if __name__ == "__main__":
    main()
