"""An export stops where learned answers end, in whatever program reads its `eos_token_id`."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from aliquot.data.token_store import TokenStore, answer_ends
from aliquot.models.generate import load
from tests.runs import command, trained, write_config

TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|text|>", "<|start|>", "<|end|>", "<|call|>"]
TEXT, START, END, CALL = range(256, 260)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte; the base's eos is not what ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|text|>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=TEXT,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return folder


def chats(base: Path, folder: Path, **sections: dict[str, Any]) -> Path:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good."}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": turns * 2}) + "\n")
    data: dict[str, Any] = {"path": str(folder / "chats.jsonl"), "document": None, "tokenizer_vocab_size": None}
    data |= {"eval_fraction": 0.0, "sequence_length": 128}
    train = {"max_steps": 1, "per_device_train_batch_size": 1, "global_batch_size": 1, "warmup_steps": 0}
    model = {"config": None, "path": str(base)}
    return write_config(folder, data=data, train=train, model=model, **sections)


def ends_of(directory: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    return model.config.eos_token_id, GenerationConfig.from_pretrained(directory).eos_token_id


def test_export_stops_at_learned_answer_ends(base: Path, tmp_path: Path) -> None:
    trained(chats(base, tmp_path))
    assert ends_of(tmp_path / "run" / "export") == ([TEXT, END], [TEXT, END])


def test_adapter_and_merged_export_stop_at_answer_ends(base: Path, tmp_path: Path) -> None:
    trained(chats(base, tmp_path, adapter={"r": 2}))
    assert load(tmp_path / "run" / "export").model.generation_config.eos_token_id == [TEXT, END]
    done = command("export", tmp_path / "run" / "checkpoints" / "step-00000001", tmp_path / "merged", "--merge")
    assert done.returncode == 0, done.stderr
    assert ends_of(tmp_path / "merged") == ([TEXT, END], [TEXT, END])


def store_of(documents: list[list[int]], learned: list[list[int]] | None) -> TokenStore:
    tokens, offsets = np.array(list(chain(*documents)), np.uint16), np.cumsum([0, *map(len, documents)])
    mask = None if learned is None else np.array(list(chain(*learned)), np.uint8)
    return TokenStore(Path(), tokens, offsets, mask)


def test_answer_end_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    newline = tokenizer.encode("\n")[0]
    chat = [START, 5, END, newline, START, 6, END, newline]

    def ends(*stores: TokenStore, learns_all: bool = False) -> tuple[int, ...]:
        return answer_ends(stores, tokenizer, learns_all)

    assert ends(store_of([chat], [[0, 0, 0, 0, 0, 1, 1, 1]])) == (END,)  # white space behind it is of the answer
    assert ends(store_of([chat, chat], [[0] * 8, [0, 0, 0, 0, 0, 1, 1, 0]])) == (END,)
    assert ends(store_of([chat], [[0, 0, 0, 0, 0, 1, 0, 0]])) == ()  # an end that is not learned
    called = [START, 5, END, START, 7, END, 8, CALL]  # a thought ends as a message does, and the turn goes on
    assert ends(store_of([called], [[0, 0, 0, 0, 1, 1, 1, 1]])) == (CALL,)
    assert ends(store_of([chat], [[1] * 8]), learns_all=True) == (END,)
    assert ends(store_of([[5, 6, TEXT], [7, END]], None)) == (TEXT,)  # of a text eos alone is an end
    assert ends(store_of([[5, 6]], None), store_of([[5, 9, CALL]], [[0, 1, 1]])) == (CALL,)
