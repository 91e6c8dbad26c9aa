"""aliquot chat and generate, as they are piped: the replies are those of plain transformers."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from aliquot.core.errors import ModelFilesError, UsageError, UserError
from aliquot.models.generate import Chat, Loaded, Sampling, chat_ids, continuation, generate, load
from tests.data.stores import byte_level
from tests.runs import command
from tests.tools import warm

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.5, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("faster", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_are_loaded_in_the_precision_that_auto_chooses(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: str, dtype: torch.dtype
) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr("aliquot.models.generate.faster_precision_here", lambda device: faster)
    assert load(tmp_path).model.dtype == dtype


def test_model_and_prompt_go_to_the_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("aliquot.models.generate.faster_precision_here", lambda device: "bf16")
    monkeypatch.setattr(LlamaForCausalLM, "to", lambda self, device: chosen.append(device))
    load(model)
    assert chosen == ["cuda"]
    on_gpu = SimpleNamespace(device=torch.device("meta"), generate=lambda ids: ids)
    assert Loaded(on_gpu, None, None, None).generate(torch.tensor([[1]])).is_meta


def talk(model: Path, said: str, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = ["-m", "aliquot", "chat", str(model), "--max-new-tokens", "12", *options]
    return subprocess.CompletedProcess(*_piped(arguments, said))


def _piped(arguments: list[str], said: str) -> tuple[list[str], int, str, str]:
    process = warm.Warm(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        encoding="utf-8", errors="surrogateescape",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    out, errors = process.communicate(said, timeout=100)
    return arguments, process.returncode, out, errors


def plain(model: Path, messages: list[dict[str, str]]) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = AutoModelForCausalLM.from_pretrained(model).generate(**asked, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(found[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


def test_chat_remembers_messages_until_reset(model: Path) -> None:
    first = [{"role": "user", "content": "hello"}]
    once = plain(model, first)
    again = plain(model, [*first, {"role": "assistant", "content": once}, {"role": "user", "content": "hello"}])
    assert once != again
    result = talk(model, "hello\n\nhello\n/reset\nhello", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{once}\n{again}\n{once}\n"


def test_system_message_and_tools_stay_after_reset(model: Path, tmp_path: Path) -> None:
    first = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    once = plain(model, first)
    result = talk(model, "hello\n/reset\nhello", "--temperature", "0", "--system", "be kind")
    assert (result.returncode, result.stdout) == (0, f"{once}\n{once}\n"), result.stderr
    loaded, tools = load(model), [{"type": "function", "function": {"name": "weather"}}]
    with pytest.raises(UsageError, match="--tools: the chat template leaves out tools"):
        Chat(loaded, Sampling(12, 0.0), None, tools)
    loaded.tokenizer.chat_template = "{{ tools[0].function.name if tools }}" + TEMPLATE
    assert "".join(Chat(loaded, Sampling(12, 0.0), None, tools).reply("hello")) != plain(model, first[1:])
    loaded.tokenizer.chat_template = TEMPLATE.replace("messages", "messages if m.role == 'user'")
    with pytest.raises(UsageError, match="--system: the chat template leaves out system messages"):
        Chat(loaded, Sampling(12, 0.0), "be kind")
    (tmp_path / "tools.json").write_text('[{"type": "function"}]')
    result = talk(model, "hello", "--tools", str(tmp_path / "tools.json"))
    assert result.returncode == 2 and "tools.json: not a list of functions: [{" in result.stderr


def test_reply_is_no_longer_than_the_model_can_read(model: Path) -> None:
    result = talk(model, "hello", "--temperature", "0", "--max-new-tokens", "1000")
    assert result.returncode == 0 and "/reset" not in result.stderr
    assert result.stdout.startswith(plain(model, [{"role": "user", "content": "hello"}])[:8])


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("x" * 300, r"aliquot: .* tokens, and this model can read 256: type /reset to begin a new one \[usage\]\n"),
        # And no bars of who loads it.
        ("hell\udcff", r"aliquot: 'hell\\udcff' is not UTF-8 text \[usage\]\n"),
    ],
    ids=["too long", "not UTF-8"],
)
def test_chat_continues_after_a_bad_line(model: Path, line: str, error: str) -> None:
    result = talk(model, f"{line}\nhello\n", "--temperature", "0")
    assert result.returncode == 0 and re.fullmatch(error, result.stderr), result.stderr
    assert result.stdout == f"\n{plain(model, [{'role': 'user', 'content': 'hello'}])}\n"


def test_generation_config_applies_to_sampling_only(model: Path, tmp_path: Path) -> None:
    """Beams cannot be streamed, and an assistant, a dictionary or a stop string fails; without a temperature the
    likeliest token is the likeliest before penalties."""
    draws = {"do_sample": True, "top_k": 7, "repetition_penalty": 1.9, "no_repeat_ngram_size": 2}
    other = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "stop_strings": ["a"]}
    shutil.copytree(model, tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps({**draws, **other, "eos_token_id": 1}))
    found = load(tmp_path / "own")
    config = found.model.generation_config
    assert (config.top_k, config.repetition_penalty, config.no_repeat_ngram_size, config.eos_token_id) == (7, 1.9, 2, 1)
    said = "".join(Chat(found, Sampling(12, 0.0, 1)).reply("hello"))
    assert said == plain(model, [{"role": "user", "content": "hello"}])
    assert "".join(Chat(found, Sampling(12, 0.8, 1)).reply("hello"))


def test_chat_without_a_template_names_generate(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    result = talk(tmp_path, "hello\n")
    assert (result.returncode, result.stdout) == (2, "")
    assert "no chat template; `aliquot generate` continues a text without one [tokenizer]" in result.stderr


@pytest.mark.long
def test_chat_on_a_terminal_prompts_and_ends_at_ctrl_d(model: Path) -> None:
    ours, theirs = pty.openpty()
    process = warm.Warm(
        ["-m", "aliquot", "chat", str(model), "--max-new-tokens", "4"], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    told = b""
    for said in (b"hello\n", b"\x04"):
        while not told.endswith(b"> "):
            told += os.read(ours, 4096)
        told += b"|"
        os.write(ours, said)
    assert process.wait(60) == 0


def test_several_prompts_continue_like_single_ones(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("two\n\nthree\n")
    options = ("--max-new-tokens", "6")
    together = command("generate", model, "--prompt", "one", "--prompts", tmp_path / "prompts.txt", *options).stdout
    alone = command("generate", model, "--prompt", "three", *options).stdout
    assert together.endswith(f"\n\n{alone}")
    assert together.startswith("one")
    (tmp_path / "signs.txt").write_bytes("\ufeffone\u2028two\r\nthree\ffour\x85five".encode())
    signs = command("generate", model, "--prompts", tmp_path / "signs.txt", "--max-new-tokens", "1").stdout
    assert signs.startswith("one\u2028two") and "\n\nthree\ffour\x85five" in signs
    nothing = command("generate", model)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "nothing to continue: give --prompt TEXT or --prompts FILE" in nothing.stderr


def test_generate_stops_at_the_models_longest_sequence(model: Path) -> None:
    found = load(model)
    for prefix, prompt in (((), ""), ((), " ".join(["word"] * 300))):
        with pytest.raises(UsageError, match=r"nothing to continue|can read 256"):
            continuation(found.model.generate, found.tokenizer, prompt, prefix, found.context_length, Sampling(8))
    made: list[int] = []

    def generate(ids: torch.Tensor, **options: object) -> torch.Tensor:
        whole: torch.Tensor = found.model.generate(ids, **options)
        made.append(whole.shape[1] - ids.shape[1])
        return whole

    asked = found.tokenizer.encode("one two", add_special_tokens=False)
    continuation(generate, found.tokenizer, "one two", (), len(asked) + 3, Sampling(300, 1e-45))
    assert 0 < made[0] <= 3


def test_unloadable_model_is_one_line(model: Path, tmp_path: Path) -> None:
    cut, bare = tmp_path / "cut", tmp_path / "bare"
    shutil.copytree(model, cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("token*"))
    for directory, told in ((cut, "truncated, or not a safetensors file"), (bare, "no tokenizer here")):
        with pytest.raises(UserError, match=told):
            load(directory)


@pytest.mark.parametrize("key, value", [("top_p", "x"), ("eos_token_id", {}), ("bad_words_ids", -1), ("top_k", [])])
def test_wrong_types_in_a_generation_config_are_one_line(model: Path, tmp_path: Path, key: str, value: object) -> None:
    shutil.copytree(model, tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelFilesError, match=r"transformers cannot (load|generate with) this model: ") as error:
        list(generate(tmp_path / "own", ["hello"], 2))
    assert "\n" not in str(error.value)


def test_chat_begins_with_the_tokens_of_training(model: Path, tmp_path: Path) -> None:
    """Before a text it may have put a bos that the template does not write."""
    directory = tmp_path / "own"
    shutil.copytree(model, directory)
    (directory / "aliquot.json").write_text(json.dumps({"prefix": [0], "chat_prefix": []}))
    found, said = load(directory), [{"role": "user", "content": "hi"}]
    rendered = found.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert chat_ids(found.tokenizer, said, found.chat_prefix) == found.tokenizer.encode(
        rendered, add_special_tokens=False
    )
