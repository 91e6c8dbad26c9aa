"""Files that a stranger put into a model or run directory are regular, small and no links, or they are refused."""

from __future__ import annotations

import codecs
import json
import os
import socket
from pathlib import Path

import pytest
import torch
from huggingface_hub import get_session
from safetensors.torch import save_file
from transformers import AutoTokenizer

from aliquot.config.schema import ModelSection
from aliquot.core import small_files
from aliquot.core.decode import read_small
from aliquot.core.errors import UserError
from aliquot.core.run_lock import LOCK
from aliquot.core.small_files import limit_hub_time, open_unlinked, publish_text, read_small_file
from aliquot.data.tokenizer import load_tokenizer
from aliquot.models.generate import load
from aliquot.models.model_files import model_files
from aliquot.models.source import resolve
from aliquot.models.stored_weights import fingerprint
from aliquot.models.untrusted_code import without_code
from aliquot.observe.metrics import MetricsFile
from aliquot.observe.run_directory import RunDirectory
from aliquot.tensor_io.bytemap import ByteMap
from tests.data.stores import byte_level

CONFIG = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(7_700_000_000)


def environment(path: Path) -> None:
    path.symlink_to("/proc/self/environ")


def secret(path: Path) -> None:
    """JSON that lies elsewhere."""
    beside = path.parent.parent / "secret.json"
    beside.write_text(json.dumps({**CONFIG, "password": "hunter2"}))
    path.symlink_to(beside)


def write_weights(directory: Path) -> None:
    save_file({"x": torch.zeros(2)}, directory / "model.safetensors")


PUT = pytest.mark.parametrize(
    ("put", "reason"),
    [(fifo, "not a regular file"), (huge, "more than"), (environment, "a link to"), (secret, "a link to")],
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    byte_level().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@PUT
@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "bpe.codes"],
)
def test_unfit_model_file_is_refused(model: Path, name: str, put, reason: str) -> None:
    (model / name).unlink(missing_ok=True)
    put(model / name)
    with pytest.raises(UserError, match=reason) as error:
        if name == "config.json":
            resolve(ModelSection(path=str(model)))
        without_code(AutoTokenizer.from_pretrained)(str(model))
    assert "\n" not in error.value.line and str(model / name) in error.value.line
    (model / "special_tokens_map.json").write_bytes(codecs.BOM_UTF8 + b"{}")  # so that a copy is read
    with pytest.raises(UserError, match=reason) as error:
        load_tokenizer(model)
    assert str(model / name) in error.value.line


def test_copy_without_byte_order_marks_has_all_templates(model: Path) -> None:
    (model / "special_tokens_map.json").write_bytes(codecs.BOM_UTF8 + b"{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "short.jinja").write_text("short")
    assert load_tokenizer(model).chat_template == {"short": "short"}


@pytest.mark.parametrize(
    ("put", "reason"), [(fifo, "not a regular file"), (secret, "a link to"), (Path.mkdir, "not a regular file")]
)
def test_weights_are_regular_files_of_their_directory(model: Path, put, reason: str) -> None:
    put(model / "model.safetensors")
    for read in (ByteMap.from_directory, load, load_tokenizer):
        with pytest.raises(UserError, match=f"model.safetensors: {reason}"):
            read(model)


def test_pickled_weights_are_not_loaded(model: Path, tmp_path: Path) -> None:
    torch.save({"lm_head.weight": torch.zeros(300, 32)}, model / "pytorch_model.bin")
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(model), "r": 1, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    torch.save({}, tmp_path / "adapter" / "adapter_model.bin")
    for directory in (model, tmp_path / "adapter"):
        with pytest.raises(UserError, match=r"convert the \.bin files first"):
            load(directory)
        write_weights(model)


@PUT
def test_export_refuses_links_out_of_the_model(model: Path, put, reason: str) -> None:
    source = resolve(ModelSection(path=str(model)))
    put(model / "generation_config.json")
    if put is fifo:  # which was never taken for a file
        assert "generation_config.json" not in model_files(source.config, byte_level(), model, (), ())
    else:
        with pytest.raises(UserError, match=reason):
            model_files(source.config, byte_level(), model, (), ())


def test_links_of_a_hub_snapshot_are_read(tmp_path: Path) -> None:
    store, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1234"
    byte_level().save_pretrained(store)
    (store / "config.json").write_text(json.dumps(CONFIG))
    snapshot.mkdir(parents=True)
    write_weights(store)
    for file in store.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert ByteMap.from_directory(snapshot).entries.keys() == {"x"} and fingerprint(snapshot)
    assert resolve(ModelSection(path=str(snapshot))).config.hidden_size == 32
    assert without_code(AutoTokenizer.from_pretrained)(str(snapshot))
    (tmp_path / "link").symlink_to(snapshot)
    assert json.loads(read_small(tmp_path / "link" / "config.json"))["vocab_size"] == 300


def test_links_within_a_directory_are_read(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "config.json").write_text("{}")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "config.json").symlink_to("..data/config.json")
    assert read_small_file(tmp_path / "config.json") == b"{}"


def test_link_in_a_run_directory_truncates_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    for name in (LOCK, "metrics.jsonl", "stacks-rank-0.txt", f".ledger.json.{os.getpid()}"):
        (run / name).symlink_to(victim)
    with pytest.raises(UserError, match="cannot write the run directory"), RunDirectory(run).lock.hold():
        raise AssertionError("it is locked")
    MetricsFile(run / "metrics.jsonl").close()
    with open_unlinked(run / "stacks-rank-0.txt", "w") as file:  # ours takes its place
        file.write("stacks")
    publish_text(run / "ledger.json", "{}")
    assert victim.read_text() == "precious"
    assert (run / "stacks-rank-0.txt").read_text() == "stacks" and not (run / "stacks-rank-0.txt").is_symlink()


WRITES_OF_RUNS = ("distributed", "observe", "core/small_files.py", "core/run_lock.py")


def test_files_of_runs_are_opened_without_links() -> None:
    source = Path(__file__).resolve().parents[2] / "src" / "aliquot"
    for part in WRITES_OF_RUNS:
        for file in [source / part] if part.endswith(".py") else (source / part).rglob("*.py"):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                opens = any(f'.open("{mode}' in line for mode in "wax") or ".write_text(" in line
                known = "/proc" in line or "clear_refs" in line or file.name == "leader_lease.py"
                assert not opens or known, f"{file}:{number}: {line.strip()}"


def test_a_hub_that_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(small_files, "_HUB_TIMEOUT_S", 0.05)
    limit_hub_time()
    with socket.create_server(("127.0.0.1", 0)) as hub, pytest.raises(Exception, match="timed out"):
        get_session().get(f"http://127.0.0.1:{hub.getsockname()[1]}", timeout=None)
