"""Code that comes with a model or a tokenizer: Python is not run, whoever says yes on standard input, and a chat
template that loops for ever ends in one line, wherever it is rendered."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aliquot.config.data_section import DataSection
from aliquot.core import template_process
from aliquot.core.errors import TokenizerError, UserError
from aliquot.data.chat_template import ChatTemplate, TokenizerFacts
from aliquot.data.prepare import prepare
from aliquot.data.text_encoder import EncoderSpec, encode_records
from aliquot.data.tokenizer import load_tokenizer
from aliquot.models.generate import chat_ids
from aliquot.tensor_io.manifest import checksum, manifest_bytes, read_manifest
from tests.cluster.cases import cluster_section
from tests.data.stores import byte_level
from tests.runs import trained, write_config
from tests.tools import warm

MODULE = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "strange"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""


def strange(folder: Path, ran: Path, model_type: str) -> Path:
    """A directory of a model and a tokenizer whose classes are in a module beside them."""
    folder.mkdir()
    (folder / "strange.py").write_text(MODULE.format(ran=str(ran)))
    names = {"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": names}))
    told = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["strange.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def said_yes(folder: Path, *words: str) -> tuple[int, str]:
    """How `aliquot` ends when every question is answered with yes, and its errors."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules")}
    process = warm.popen("-m", "aliquot", *words, env=environ, **pipes)
    out, errors = process.communicate("yes\n" * 50, timeout=100)
    assert "Do you wish to run" not in out + errors
    return process.returncode, errors


@pytest.mark.parametrize(
    "command",
    [
        ("train", "CONFIG", "data.tokenizer_vocab_size=null", "data.tokenizer=STRANGE"),
        ("train", "CONFIG", "data.tokenizer_vocab_size=null", "model.config=null", "model.path=STRANGE"),
        ("plan", "CONFIG", "model.config=null", "model.path=STRANGE"),
        ("generate", "STRANGE", "--prompt", "hello"),
        ("evaluate", "STRANGE", "TEXT", "--sequence-length", "32", "--ranks", "1"),
        *(
            pytest.param(command, marks=pytest.mark.long)
            for command in (
                ("chat", "STRANGE"),
                ("data", "show", "CONFIG", "data.tokenizer_vocab_size=null", "data.tokenizer=STRANGE"),
                ("data", "show", "CONFIG", "data.tokenizer_vocab_size=null", "model.config=null", "model.path=STRANGE"),
                ("instances", "--fits", "ITS"),
                ("cluster", "render", "ITS", "-o", "MANIFESTS"),
            )
        ),
    ],
    ids=lambda command: f"{command[0]} {command[-1]}",
)
@pytest.mark.parametrize("model_type", ["strange", pytest.param("llama", marks=pytest.mark.long)])
def test_untrusted_code_is_not_run(tmp_path: Path, command: tuple[str, ...], model_type: str) -> None:
    ran = tmp_path / "ran"
    directory, config = strange(tmp_path / "strange", ran, model_type), write_config(tmp_path)
    if "data.tokenizer=STRANGE" in command:
        (directory / "config.json").unlink()
    its = write_config(tmp_path / "its", model={"path": str(directory), "config": None}, cluster=cluster_section())
    places = {"STRANGE": directory, "CONFIG": config, "ITS": its, "TEXT": tmp_path / "text.txt"}
    places["MANIFESTS"] = tmp_path / "manifests"
    halves = (word.rpartition("=") for word in command)
    words = [before + equals + str(places.get(last, last)) for before, equals, last in halves]
    status, errors = said_yes(tmp_path, *words)
    assert not ran.exists(), "it was run"
    plans = command[0] in ("plan", "instances", "cluster")
    if plans and model_type == "llama":  # whose own code and default sizes are planned
        assert status in (0, 1), errors
    else:
        last = errors.splitlines()[-1]  # transformers may have warned before
        assert status == 2 and last.startswith("aliquot: ") and "Traceback" not in errors, errors


def test_tokenizer_with_code_loads_without_it(tmp_path: Path) -> None:
    directory, alone = strange(tmp_path / "strange", tmp_path / "ran", "llama"), tmp_path / "alone"
    (directory / "config.json").unlink()
    byte_level().backend_tokenizer.save(str(directory / "tokenizer.json"))
    for given in (directory, directory / "tokenizer.json"):
        with pytest.raises(TokenizerError, match=r"a new directory with its tokenizer\.json only$") as caught:
            load_tokenizer(given)
        assert str(caught.value).count(str(directory)) == 1
    alone.mkdir()
    shutil.copy(directory / "tokenizer.json", alone)
    for given in (alone, alone / "tokenizer.json"):
        assert load_tokenizer(given).encode("fox")
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["strange", "llama"])
def test_export_drops_the_named_code(tmp_path: Path, model_type: str) -> None:
    trained(write_config(tmp_path, train={"max_steps": 2}, checkpoint={"export": False}))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    saved, ran = read_manifest(checkpoint), tmp_path / "ran"
    files = {}
    for file in strange(tmp_path / "strange", ran, model_type).iterdir():
        content = file.read_bytes()
        if file.suffix == ".json":
            content = json.dumps(json.loads((checkpoint / file.name).read_text()) | json.loads(content)).encode()
        (checkpoint / file.name).write_bytes(content)
        files[file.name] = checksum(content)
    manifest = manifest_bytes({**saved.files, **files}, sorted({*saved.config_files, *files}))
    (checkpoint / "manifest.json").write_bytes(manifest)
    status, errors = said_yes(tmp_path, "export", str(checkpoint), str(tmp_path / "out"))
    assert not ran.exists(), "it was run"
    assert status == (0 if model_type == "llama" else 2), errors


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
POWER = "{% set x = 7**(10**8) %}"  # one operation, which Jinja begins when it compiles the template
WIDE = "{{ 'a'.center(3000000000) }}"
MARKED = "{% generation %}x{% endgeneration %}"
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def encoded(tokenizer: Any) -> None:
    text = json.dumps({"messages": TALK, "context": 0})
    next(encode_records(tokenizer, [text], EncoderSpec("unused", True, (), (), answers=True, templated=True)))


def encoded_in_a_thread(tokenizer: Any) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(encoded, tokenizer).result()


def chat_with(tokenizer: Any) -> None:
    chat_ids(tokenizer, TALK[:1], None)


@pytest.mark.parametrize(
    "template, render, reason",
    [
        (LOOPS, encoded, "loops for ever"),
        (LOOPS, encoded_in_a_thread, "loops for ever"),
        pytest.param(MARKED + LOOPS, encoded, "loops for ever", marks=pytest.mark.long),
        (LOOPS, chat_with, "loops for ever"),
        (POWER, encoded, "loops for ever"),
        (WIDE, encoded, "more than 256 MiB"),
        pytest.param(WIDE, chat_with, "more than 256 MiB", marks=pytest.mark.long),
    ],
)
def test_limits_of_a_template(
    monkeypatch: pytest.MonkeyPatch, template: str, render: Callable[[Any], None], reason: str
) -> None:
    monkeypatch.setattr(template_process.limits, "cpu_s", 0.05)
    monkeypatch.setattr(template_process.limits, "memory_bytes", 256 << 20)
    monkeypatch.setattr(template_process, "_processes", processes := {})
    tokenizer = byte_level()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=f"the chat template fails: .*{reason}") as error:
        render(tokenizer)
    assert "\n" not in error.value.line
    tokenizer.chat_template = MARKED
    encoded(tokenizer)  # a process is there for the next template
    for process in processes.values():
        process.close()


def test_many_quotes_and_percent_signs_in_a_template() -> None:
    """The time to look for the formats of dates grows with the length of the template, not with its square."""
    facts = TokenizerFacts.of(byte_level())
    source = "{# strftime_now('%d') 'a' \"%j\" it's #}" + "'%" * 200_000
    times = ChatTemplate.of(replace(facts, chat_template=source), {}, "2024-02-03").times
    assert (times["%d"], times["%j"]) == ("03", "034")


@pytest.mark.long
@pytest.mark.parametrize("num_proc", [1, 2])
def test_in_a_run(tmp_path: Path, num_proc: int) -> None:
    """In this process and in one that tokenises."""
    records = [json.dumps({"messages": TALK})] * (2 if num_proc == 1 else 40_000)
    (tmp_path / "chats.jsonl").write_text("\n".join(records))
    tokenizer = byte_level()
    tokenizer.chat_template = LOOPS
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    section = DataSection(
        path=[str(tmp_path / "chats.jsonl")], tokenizer=str(tmp_path / "tokenizer"), sequence_length=32,
        num_proc=num_proc, cache_directory=tmp_path / "cache",
    )  # fmt: skip
    with pytest.raises(UserError, match="loops for ever"):
        prepare(section, None, 1000)
