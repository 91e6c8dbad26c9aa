"""Nodes that do not train the same end in one line that names the difference; nothing is trained."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from aliquot.config.read_config import read_config
from aliquot.core.errors import UserError
from aliquot.distributed.config_consistency import check_equal_on_ranks, common_settings, describe_differences
from aliquot.distributed.topology import Topology
from aliquot.observe import run_directory
from aliquot.observe.run_directory import RunDirectory
from tests.plain import save_llama
from tests.runs import free_port, write_config
from tests.tools import warm


def two_nodes(config: Path, *others: str) -> list[tuple[int, str]]:
    """Exit code and last words of two nodes of one rank each; `others` are settings of node 1 alone."""
    port = free_port()
    own = [
        f"launch.master_port={port}",
        "launch.master_address=127.0.0.1",
        "launch.nodes=2",
        "launch.join_timeout_s=60",
    ]
    nodes = [
        warm.popen(
            "-m", "aliquot", "train", config, *own, f"launch.node_rank={node}", *(others if node else ()),
            env={**os.environ, "ALIQUOT_SECRET": "word of the job"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    return [(node.returncode, output.splitlines()[-1]) for node, output in zip(nodes, outputs, strict=True)]


def another_text(folder: Path) -> str:
    """Of the same length, elsewhere."""
    (folder / "other.txt").write_text((folder / "text.txt").read_text().replace("rank", "bank"))
    return f"data.path={folder / 'other.txt'}"


def another_directory(folder: Path) -> str:
    return f"run.directory={folder / 'elsewhere'}"


CASES: dict[str, tuple[Callable[[Path], str], str]] = {
    "steps": (lambda folder: "train.max_steps=7", "train.max_steps is 6 there and 7 here"),
    "text": (another_text, "data (hash of the tokens) is"),
    "directory": (another_directory, "does not see the files that node 0 writes"),
    "seed": (lambda folder: "run.seed=6", "run.seed is 5 there and 6 here"),
    "engine": (lambda folder: "shard.engine=fsdp", "shard.engine is auto there and fsdp here"),
    "sequence": (lambda folder: "data.sequence_length=16", "data.sequence_length is 32 there and 16 here"),
    "batch": (lambda folder: "train.global_batch_size=4", "train.global_batch_size is 5 there and 4 here"),
    "precision": (lambda folder: "train.precision=bf16", "train.precision is fp32 there and bf16 here"),
    "checkpoints": (lambda folder: "checkpoint.every=2", "checkpoint.every is auto there and 2 here"),
    "model": (lambda folder: "model.config.hidden_size=64", "model.config.hidden_size is 32 there and 64 here"),
}
SHORT = ("text",)
MARKED = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in CASES]


@pytest.mark.parametrize("case", MARKED)
def test_differing_node_is_named_by_all(tmp_path: Path, case: str) -> None:
    config = write_config(tmp_path)
    change, words = CASES[case]
    ended = two_nodes(config, change(tmp_path))
    for code, line in ended:
        assert code == 2 and line.startswith("aliquot: ") and line.endswith("[nodes-differ]"), ended
    assert any(words in line for _, line in ended), ended
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.long
def test_different_weights_of_equal_sizes_are_reported(tmp_path: Path) -> None:
    trained = tmp_path / "model"
    save_llama(trained)
    other = shutil.copytree(trained, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: 3 * weight for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    config = write_config(tmp_path)
    text = config.read_text()
    start, stop = text.index("model:\n"), text.index("observe:\n")
    config.write_text(text[:start] + f"model:\n  path: {trained}\n" + text[stop:])
    ended = two_nodes(config, f"model.path={other}")
    assert all(code == 2 and "weights (hash of samples) is" in line for code, line in ended), ended


@pytest.mark.long
def test_error_of_one_node_is_reported_by_all(tmp_path: Path) -> None:
    """Its model, by a file of the same name elsewhere, knows fewer positions."""
    config = write_config(tmp_path)
    model = yaml.safe_load(config.read_text())["model"]["config"]
    files = [tmp_path / f"{name}.json" for name in ("model", "shorter")]
    for file, positions in zip(files, (64, 16), strict=True):
        file.write_text(json.dumps({**model, "max_position_embeddings": positions}))
    text = config.read_text()
    start, stop = text.index("model:\n"), text.index("observe:\n")
    config.write_text(text[:start] + f"model:\n  config: {files[0]}\n" + text[stop:])
    ended = two_nodes(config, f"model.config={files[1]}")
    for code, line in ended:
        assert code == 2 and "rank 1: data.sequence_length is 32, but the model has 16 positions" in line, ended


def test_rank_with_other_settings_is_named(tmp_path: Path) -> None:
    """As by a loop on one host: no launcher gives both ranks the same settings."""
    config = write_config(tmp_path)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        warm.popen(
            "-m", "aliquot", "train", config, *(["train.learning_rate=0.1"] if rank else []),
            env={**os.environ, **world, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = "".join(rank.communicate(timeout=120)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2], told
    assert "rank 1 differs from rank 0: train.learning_rate is" in told


@pytest.mark.long
def test_local_settings_may_differ(tmp_path: Path) -> None:
    config = write_config(tmp_path, train={"max_steps": 1})
    copy = shutil.copy(tmp_path / "text.txt", tmp_path / "copy.txt")
    ended = two_nodes(
        config, f"data.path={copy}", f"data.cache_directory={tmp_path / 'cache'}", "observe.console=quiet"
    )
    assert [code for code, _ in ended] == [0, 0], ended


class Gathered:
    """Two ranks, of which this one is the first and the other, on `node`, tells `other`."""

    rank = 0

    def __init__(self, other: dict[str, Any], node: int = 1) -> None:
        self._other = other
        self._node = node
        self.topology = Topology(0, 2, 0, 1, 0, 2, "cpu", 1, ())

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [value, hashlib.sha256(json.dumps(self._other, sort_keys=True).encode()).hexdigest()]
        return [value, [self._node, self._other]]


def test_differences_show_both_values() -> None:
    own = {"train": {"max_steps": 5, "seed": 1}, "model.config": {"layer_types": ["a", "b"]}, "tuple": (1, 2)}
    other = {"train.max_steps": 5, "train.seed": 1, "model.config.layer_types": ["a", "b"], "tuple": [1, 2]}
    check_equal_on_ranks(Gathered(other), lambda: own)  # type: ignore[arg-type]
    check_equal_on_ranks(Gathered({**other, "train.max_steps": 5.0}), lambda: own)  # type: ignore[arg-type]
    differing = {**other, "train.max_steps": 7, "new": 3}
    del differing["train.seed"]
    with pytest.raises(UserError) as told:
        check_equal_on_ranks(Gathered(differing), lambda: own)  # type: ignore[arg-type]
    assert "node 1 (rank 1) differs from node 0: train.max_steps is 5 there and 7 here;" in str(told.value)
    assert "train.seed is 1 there and not set here; new is not set there and 3 here" in str(told.value)
    with pytest.raises(UserError, match=r"^rank 1 differs from rank 0: train\.max_steps is 5 there and 7"):
        check_equal_on_ranks(Gathered(differing, node=0), lambda: own)  # type: ignore[arg-type]
    assert describe_differences({"a": 64 * "0"}, {"a": 64 * "1"}) == "a is 00000000 there and 11111111 here"


def test_common_settings_leave_out_local_keys(tmp_path: Path) -> None:
    told = common_settings(read_config(write_config(tmp_path)))
    compared = {"train.max_steps", "run.seed", "shard.engine", "checkpoint.every", "data.sequence_length"}
    assert compared | {"model.config.hidden_size", "version of torch", "train.precision"} <= told.keys()
    assert not {key for key in told if key.startswith(("launch", "cluster", "data.path", "run.directory"))}


def test_settings_compare_tokenizer_and_code_not_template_path(tmp_path: Path) -> None:
    one, other = (
        common_settings(
            read_config(write_config(tmp_path, data={"tokenizer_vocab_size": size, "chat_template": place}))
        )
        for size, place in ((300, "a.jinja"), (320, "b.jinja"))
    )
    assert describe_differences(one, other) == "data.tokenizer_vocab_size is 300 there and 320 here"
    assert len(one["files of aliquot (hash)"]) == 12


def test_settings_ignore_paths_of_a_node(tmp_path: Path) -> None:
    def told(place: str) -> dict[str, Any]:
        own = {
            "model": {"config": f"{place}/config.json"},
            "data": {
                "sources": [{"name": "a", "path": f"{place}/a.txt", "weight": 2.0}],
                "eval_sources": [{"name": "b", "path": f"{place}/b.txt"}],
            },
            "checkpoint": {"resume": f"{place}/step-00000100"},
        }
        (tmp_path / "own.yaml").write_text(json.dumps(own))
        return common_settings(read_config(tmp_path / "own.yaml"))

    assert told("/here") == told("/there")
    assert told("/here")["checkpoint.resume"] != "auto"
    (source,) = told("/here")["data.sources"]
    assert (source["name"], source["weight"]) == ("a", 2.0)


def test_linked_checkpoint_directory_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "_VISIBLE_S", 0.2)
    run, link = RunDirectory(tmp_path / "run"), tmp_path / "run" / "checkpoints"
    (tmp_path / "run").mkdir()
    for place in ("disk", "disk-of-node-1"):
        (tmp_path / place).mkdir()
    link.symlink_to(tmp_path / "disk")
    name = run.create_marker()
    run.find_marker(name)
    link.unlink()
    link.symlink_to(tmp_path / "disk-of-node-1")
    with pytest.raises(UserError, match="checkpoints: this node does not see the files that node 0 writes here"):
        run.find_marker(name)


def test_unshared_directory_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "_VISIBLE_S", 0.2)
    first, own = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "elsewhere")
    with first.lock.hold():
        earlier = first.create_marker()  # it was killed then
        name = first.create_marker()
        RunDirectory(tmp_path / "run").find_marker(name)
        with pytest.raises(UserError, match="does not see the files that node 0 writes here"):
            own.find_marker(name)
        with own.lock.hold(), pytest.raises(UserError, match="does not see"):  # another run's
            own.find_marker(name)
        with pytest.raises(UserError, match="does not see"):
            first.find_marker(earlier)
        with pytest.raises(UserError, match="another process is training"), RunDirectory(tmp_path / "run").lock.hold():
            pass
        RunDirectory(tmp_path / "run").check(read_config(write_config(tmp_path)))  # the file alone is no run
        first.remove_marker(name)
        assert [file.name for file in first.path.iterdir()] == [".lock"]
