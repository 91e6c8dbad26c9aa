"""Fill docs/guides/data.md with the output of `aliquot data show`: `python -m tests.tools.docs_data`.

An example on the page is one or more blocks of records (json, csv, text), a block with a configuration (yaml), and a
block with the command and its output. The records are written to the files that the configuration names. Models of the
hub are replaced by a small tokenizer with the model's chat template, if the model has one. Progress is left out, and
after the first example also the lines about epochs and steps.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tests.tools.docs_pages import ROOT

PAGE = ROOT / "docs" / "guides" / "data.md"
_TOKENIZER = ROOT.parent / "shared" / "tokenizers" / "llama3" / "tokenizer.json"
_WORDS = 20_000  # of the tokenizer's 128,000, so that it loads quickly
_TEMPLATES = {"Qwen/Qwen3-4B-Instruct-2507": "qwen3_instruct_2507", "Qwen/Qwen3-8B": "qwen3"}  # in the package `trl`
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_OF_LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"\$ aliquot data show (\S+)\n")
_SHAPE = {"model_type": "llama", "vocab_size": _WORDS + 16, "hidden_size": 8, "intermediate_size": 8,
          "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8192}  # fmt: skip


def page(directory: Path) -> str:
    """Return the page with outputs of today; run the commands in `directory`, which is empty."""
    text, parts, at, count = PAGE.read_text(), [], 0, 0
    records: list[tuple[str, str]] = []
    config = ""
    (directory / "examples").symlink_to(ROOT / "examples")
    with contextlib.chdir(directory):
        for block in _BLOCK.finditer(text):
            language, content = block.groups()
            if language in ("json", "csv", "text"):
                records.append((language, content))
            elif language == "yaml":
                config = content
            elif command := _COMMAND.match(content):
                printed = show(config, records)
                lines = printed if count == 0 else [line for line in printed if not _is_about_steps(line)]
                parts += [text[at : block.start()], "\n".join(["```", command[0].rstrip("\n"), *lines, "```"])]
                at, records, count = block.end(), [], count + 1
    return "".join([*parts, text[at:]])


def show(config: str, records: list[tuple[str, str]]) -> list[str]:
    """Return the lines that `aliquot data show` prints for a configuration and the contents of its files."""
    from aliquot.cli import data_command

    values = yaml.safe_load(config)
    values["model"] = {"path": str(_model(values["model"]["path"]))}
    for source, (language, content) in zip(values["data"].get("sources", [values["data"]]), records, strict=True):
        _write(source, language, content)
    Path("run.yaml").write_text(json.dumps(values))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        data_command.show(Path("run.yaml"))
    return [line for line in printed.getvalue().splitlines() if not line.startswith("tokenising")]


def _model(name: str) -> Path:
    """Return a directory with the chat template of a model, a small tokenizer with its tokens, and a small shape."""
    directory = Path(name)
    if not directory.exists():
        directory.mkdir(parents=True)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if name in _TEMPLATES:
            settings |= {"eos_token": "<|im_end|>", "pad_token": _SPECIAL[0]}
        else:
            settings |= {"bos_token": _OF_LLAMA[0], "eos_token": _OF_LLAMA[1]}
        (directory / "tokenizer.json").write_text(_tokenizer(_SPECIAL if name in _TEMPLATES else _OF_LLAMA))
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        if name in _TEMPLATES:
            template = files("trl").joinpath("chat_templates", f"{_TEMPLATES[name]}.jinja")
            (directory / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"))
        (directory / "config.json").write_text(json.dumps(_SHAPE))
    return directory


@cache
def _tokenizer(special: tuple[str, ...]) -> str:
    """Return Llama 3.1's tokenizer.json with its most frequent tokens, with `special` and Qwen3's added tokens."""
    fields = json.loads(_TOKENIZER.read_text())
    model = fields["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < _WORDS}
    pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
    model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= model["vocab"].keys()]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    fields["added_tokens"] = [
        {"id": number, "content": token, "special": token in special, **flags}
        for number, token in enumerate([*special, *_ADDED], _WORDS)
    ]
    fields["post_processor"] = None
    return json.dumps(fields)


def _write(source: dict[str, Any], language: str, content: str) -> None:
    if "dataset" in source:
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_list(list(_objects(content))).save_to_disk(source["dataset"])
    elif language == "json":
        Path(source["path"]).write_text("".join(f"{json.dumps(record)}\n" for record in _objects(content)))
    else:
        Path(source["path"]).write_text(content)


def _objects(text: str) -> Iterator[Any]:
    while text := text.lstrip():
        value, end = json.JSONDecoder().raw_decode(text)
        text = text[end:]
        yield value


def _is_about_steps(line: str) -> bool:
    return line.startswith(("an epoch: ", "this run has only ")) or re.search(r" steps? of ", line) is not None


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["ALIQUOT_CACHE"] = os.environ["HF_HOME"] = f"{directory}/cache"
        (Path(directory) / "place").mkdir()
        PAGE.write_text(page(Path(directory) / "place"))


if __name__ == "__main__":
    main()
