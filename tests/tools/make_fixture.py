"""Writes tests/fixtures/VERSION for tests/test_compatibility.py: `python -m tests.tools.make_fixture`.

A fixture has two small runs of that version, each with its export and with a checkpoint two steps before the end, and
the names that the documentation of that version promises. A fixture is made once and never changed.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tests.runs import write_text
from tests.tools.docs_pages import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
PAGES = ("docs/reference/config.md", "docs/reference/commands.md", "docs/guides/troubleshooting.md")
# Paths are relative, so that a copy of the fixture can be resumed anywhere. `adapter` trains beside the export of
# `model` and writes the formats that `model` does not write: an adapter in bf16 and moments in int8.
CONFIGS = {
    "model": """\
run: {name: model, directory: model, seed: 5}
model:
  config:
    model_type: llama
    hidden_size: 16
    intermediate_size: 24
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 1
    max_position_embeddings: 64
    tie_word_embeddings: true
data: {path: text.txt, document: line, tokenizer_vocab_size: 300, sequence_length: 32, eval_fraction: 0.1, num_proc: 1}
train: {max_steps: 5, global_batch_size: 4, learning_rate: 1e-2, lr_scheduler_type: cosine, precision: fp32}
checkpoint: {every: 3, last: false}
launch: {ranks: 1, device: cpu}
observe: {report_to: []}
""",
    "adapter": """\
run: {name: adapter, directory: adapter, seed: 5}
model: {path: model/export}
adapter: {r: 2, alpha: 4.0}
data: {path: text.txt, document: line, sequence_length: 32, eval_fraction: 0.1, num_proc: 1}
train: {max_steps: 5, global_batch_size: 4, learning_rate: 1e-2, optimizer_states: int8}
checkpoint: {every: 3, last: false}
launch: {ranks: 1, device: cpu}
observe: {report_to: []}
""",
}


def promised_names(page: Path) -> list[str]:
    """The commands, sections and ids that `page` has as headings, its config keys, and each `COMMAND --option`."""
    return sorted(set(_names(page.read_text(encoding="utf-8"))))


def _names(text: str) -> Iterator[str]:
    heading = ""
    for line in text.splitlines():
        if found := re.match(r"##+ `(.+)`$", line):
            heading = found[1]
            yield heading
        elif found := re.match(r"\| `(.+?)` \|", line):
            options = re.findall(r"--[a-z-]+", found[1])
            yield from (f"{heading} {option}" for option in options) if options else [found[1]]


def make(folder: Path) -> None:
    """Fill `folder`, which is empty, with the files of a fixture."""
    write_text(folder)
    for name, config in CONFIGS.items():
        (folder / f"{name}.yaml").write_text(config)
        subprocess.run([sys.executable, "-m", "aliquot", "train", f"{name}.yaml"], cwd=folder, check=True)
        shutil.rmtree(folder / name / "logs", ignore_errors=True)
        for leftover in (".lock", "report.html"):  # the tests make the report
            (folder / name / leftover).unlink(missing_ok=True)
        for file in (folder / name / "events.jsonl", folder / name / "ledger.json"):
            _remove_machine_names(file)
    names = {page: promised_names(ROOT / page) for page in PAGES}
    (folder / "names.json").write_text(json.dumps(names, indent=1) + "\n")


def _remove_machine_names(file: Path) -> None:
    text = file.read_text()
    for private in (platform.node(), platform.release()):
        text = text.replace(json.dumps(private), '"unnamed"')
    file.write_text(text)


if __name__ == "__main__":
    place = FIXTURES / version("aliquot")
    if place.exists():
        sys.exit(f"{place} exists: a fixture is never changed. Remove it first if its version was never published.")
    with tempfile.TemporaryDirectory(prefix="aliquot-") as temporary:  # adapter_config.json names the folder
        make(Path(temporary))
        shutil.copytree(temporary, place)
