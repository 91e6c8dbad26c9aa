"""Parse the arguments of every benchmark, with `--smoke`, which runs the real code path in seconds.

A smoke run takes the smallest shape and shows that the benchmark works; its figures mean nothing. `choose` selects the
constants of such a run. The processes of a benchmark inherit the choice.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

_VARIABLE = "ALIQUOT_BENCHMARK_SMOKE"
if "--smoke" in sys.argv:
    os.environ[_VARIABLE] = "1"
SMOKE = _VARIABLE in os.environ

DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"
VOCABULARY = 512
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
}  # fmt: skip

Value = TypeVar("Value")


def choose(full: Value, smoke: Value) -> Value:
    """Return the second value in a smoke run."""
    return smoke if SMOKE else full


def parse(arguments: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """Parse with --json and --smoke added. `smoke` replaces defaults in a smoke run; functions are called."""
    arguments.add_argument("--json", type=Path, help="result file: machine facts, rows and targets")
    arguments.add_argument("--smoke", action="store_true", help="a test with the smallest shape, in seconds")
    if SMOKE:
        arguments.set_defaults(**{name: value() if callable(value) else value for name, value in smoke.items()})
    return arguments.parse_args()


@cache
def text() -> Path:
    """Return a plain text: the English pages of the documentation."""
    file = _folder() / "text.txt"
    file.write_text("\n\n".join(page.read_text() for page in sorted(DOCUMENTS.glob("*/*.md"))))
    return file


@cache
def tokenizer() -> Path:
    """Return a directory with a tokenizer of VOCABULARY pieces."""
    from benchmarks.prepare import make_tokenizer

    make_tokenizer(_folder(), [text().read_text()], VOCABULARY)
    return _folder() / "tokenizer"


@cache
def model() -> Path:
    """Return a directory with a tiny model of random weights and its tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    directory = _folder() / "model"
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer()).save_pretrained(directory)
    return directory


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="aliquot-smoke-")  # removed when the interpreter ends


def _folder() -> Path:
    return Path(_scratch().name)
