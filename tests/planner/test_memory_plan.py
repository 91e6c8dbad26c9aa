"""Placement on disk: the least that makes a run fit, rarely used states first.

A run fits into a control group of its planned peak plus 5 percent.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from aliquot.config.schema import RunConfig
from aliquot.core.errors import EngineError
from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import OnDisk, first_of
from aliquot.engines.host.host_memory import disk_use
from aliquot.machine.cgroup import control_groups, read_text
from aliquot.machine.cpu import read_cpu
from aliquot.models.model_shape import numel
from aliquot.models.shaped_model import shaped_model
from aliquot.planner.fit_check import full_disks
from aliquot.planner.memory_plan import MARGIN, least_on_disk
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planner import plan
from aliquot.planner.settings_search import Candidate, Search
from tests.examples import examples
from tests.planner.shapes import LLAMA, planned_config, search_on

SHAPE = shaped_model(planned_config(LLAMA)).shape
LARGE = sum(count * numel(each) for each, count in SHAPE.alike.items() if len(each) > 1)
LAYOUT = RankLayout(1, 1, 1, "cpu")
MACHINE = Machine.from_numbers(16, 4, None)
SLOW = replace(MACHINE, disk_bytes_per_s=4e7)  # a forward pass of a small batch does not hide an update
WIDE = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}


def saved(on_disk: OnDisk) -> int:
    return sum(8 * count * numel(each) for each, count in on_disk.states) + sum(
        4 * count * numel(each) for each, count in on_disk.gradients
    )


@given(excess=st.integers(0, 14 * LARGE))
@settings(max_examples=examples(40))
def test_least_goes_to_disk(excess: int) -> None:
    found = least_on_disk(SHAPE, LAYOUT, True, lambda on_disk: excess - saved(on_disk))
    assert bool(found) == (excess > 0)
    everything = least_on_disk(SHAPE, LAYOUT, True, lambda on_disk: 1.0)
    if excess > saved(everything):
        assert found == everything
    else:
        assert excess <= saved(found) < excess + 8 * max(map(numel, SHAPE.weights))
    assert everything.layers == SHAPE.layers and (found == everything or not found.layers)
    assert not least_on_disk(SHAPE, LAYOUT, False, lambda on_disk: 1.0).layers
    if found.gradients:
        assert found.states == everything.states
        assert all(dict(found.states)[each] >= count for each, count in found.gradients)
    assert TypeAdapter(OnDisk).validate_python(json.loads(json.dumps(vars(found)))) == found


@pytest.mark.parametrize("excess", [1, 3 * LARGE, 8 * LARGE, 11 * LARGE, 64 * 14 * LARGE])
def test_placement_of_many_layers_needs_few_plans(excess: int) -> None:
    """A search over settings asks for each of them."""
    asked: list[OnDisk] = []

    def too_much(on_disk: OnDisk) -> float:
        asked.append(on_disk)
        return 64 * excess - saved(on_disk)

    shape = replace(SHAPE, learned=64 * SHAPE.learned)
    least_on_disk(shape, LAYOUT, True, too_much)
    assert len(asked) <= 3 + 2 * sum(shape.alike.values()).bit_length()


def test_embedding_sums_stay_in_memory() -> None:
    everything = least_on_disk(SHAPE, LAYOUT, True, lambda on_disk: 1.0)
    shapes = list(SHAPE.weights)
    embedding = shapes.index(SHAPE.embedding)
    there = first_of(shapes, everything.gradients, never=embedding)
    assert embedding not in there and embedding in first_of(shapes, everything.states)
    assert len(there) == sum(len(each) > 1 for each in shapes) - 1


def test_frozen_layers_go_to_disk_last() -> None:
    frozen = {"freeze": ["model.embed_tokens.*", "model.layers.*.mlp.*", "model.layers.1.*"]}
    shape = shaped_model(planned_config(LLAMA, train=frozen)).shape
    everything = least_on_disk(shape, LAYOUT, True, lambda on_disk: 1.0)
    assert everything.layers == shape.layers and everything.states == tuple(
        (each, shape.alike[each]) for each, _ in everything.states
    )
    mlp, attention = {(320, 128), (128, 320)}, {(128, 128), (64, 128)}
    assert set(everything.frozen) == mlp | attention  # those of layer 1, and no look-up and no norms
    assert not least_on_disk(shape, LAYOUT, False, lambda on_disk: 1.0).frozen
    fewer = least_on_disk(shape, LAYOUT, True, lambda on_disk: 2.0 - on_disk.layers)
    assert fewer.layers == 2 and fewer.frozen == everything.frozen
    assert not least_on_disk(shape, LAYOUT, True, lambda on_disk: 1.0 - bool(on_disk.gradients)).frozen
    assert TypeAdapter(OnDisk).validate_python(json.loads(json.dumps(vars(everything)))) == everything
    config = planned_config(LLAMA, train=frozen)
    size, moved = (
        [of(disk_use(config, shape, LAYOUT, replace(everything, layers=count), 3)) for count in (0, 4)]
        for of in (lambda use: use.size, lambda use: use.beside_read)
    )
    in_layers = sum(numel(each) * len(kind.positions) for kind in shape.kinds for each in kind.weights if len(each) > 1)
    assert size[1] - size[0] == 2 * in_layers and moved[1] - moved[0] == 3 * 2 * 2 * in_layers
    whole, none = (disk_use(config, shape, LAYOUT, replace(everything, states=(), layers=n), 3) for n in (4, 0))
    assert whole.written == none.written and whole.update == none.update  # what learns nothing is never written


def limited(gib: float, **train: object) -> RunConfig:
    shard = {"engine": "host", "offload": "disk", "memory": gib}
    return planned_config(WIDE, shard=shard, train={"gradient_checkpointing": "none", **train})


def test_plan_states_disk_use_and_cost() -> None:
    free = plan(limited(16), MACHINE, ranks_per_node=2)
    assert not free.on_disk and free.disk_s == free.scratch_bytes_per_node == 0 and free.disk_words is None
    limit = (2 * free.peak_bytes_per_rank + free.beside_bytes) / 2**30
    fast, less = (plan(limited(limit), machine, ranks_per_node=2) for machine in (MACHINE, SLOW))
    assert less.fits and less.on_disk and not less.on_disk.gradients and less.disk_s > 10 * fast.disk_s > 0
    assert less.peak_bytes_per_rank <= (1 - MARGIN) * less.limit_bytes
    assert less.step_s == pytest.approx(free.step_s + less.disk_s, rel=0.1)
    assert less.disk_words is not None and "states of" in less.disk_words and "TB written a day" in less.disk_words
    assert less.disk_batch is not None and less.disk_s > 0.05 * less.step_s
    assert f"5% with {less.disk_batch:,} sequences a step" in less.disk_words
    enough = plan(limited(limit, global_batch_size=less.disk_batch), SLOW, ranks_per_node=2)
    assert 0.01 < enough.disk_s / enough.step_s <= 0.05 and "sequences a step" not in str(enough.disk_words)
    least = plan(limited(0.1), MACHINE, ranks_per_node=2)
    assert not least.fits and least.on_disk.gradients and least.scratch_bytes_per_node > less.scratch_bytes_per_node


def test_glibc_is_planned_with_holes() -> None:
    """The holes are a fraction of activations and gathered weights; layers that stream have a limit instead."""
    config = planned_config(LLAMA)
    machine = Machine.from_numbers(64, 2, None)
    peaks = [plan(config, replace(machine, allocator=name)).phases[-1] for name in ("tcmalloc", "glibc")]
    tcmalloc, glibc = (phase.private_bytes for phase in peaks)
    passes = tcmalloc["activations"] + tcmalloc["gathered"]
    assert glibc["allocator"] - tcmalloc["allocator"] == pytest.approx(0.37 * passes, rel=0.01)
    assert {**glibc, "allocator": 0} == {**tcmalloc, "allocator": 0}


@pytest.mark.long
def test_disk_is_the_last_resort() -> None:
    config, machine = planned_config(WIDE), Machine.from_numbers(0.8, 2, None)
    told = search_on(machine, config, machine.layout(config)).remedies()
    assert told.startswith("What fits: shard.offload=disk ")


@pytest.mark.long
def test_too_small_disk_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(Machine.from_numbers(0.8, 2, None), cpu=read_cpu())
    config = planned_config(WIDE, run={"directory": str(tmp_path)})
    search, free = search_on(machine, config, RankLayout(1, 2, 1, "cpu")), os.statvfs(tmp_path)
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_blocks=1, f_bavail=1 << 40, f_frsize=free.f_frsize)
    )
    assert search.remedies().startswith("What fits: shard.offload=disk ")
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=1, f_bavail=1, f_frsize=free.f_frsize))
    told = search.remedies()
    assert re.fullmatch(
        r"No tried setting fits: take more memory, [\d.]+ GB of a disk for shard\.offload=disk"
        r" \(shard\.offload_directory\), or a smaller model",
        told,
    ), told


def test_search_without_disk_runs_once_if_disk_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config, machine = limited(0.1), Machine.from_numbers(0.8, 2, None)
    searches: list[tuple[object, ...]] = []

    def candidates(*arguments: object) -> Iterator[Candidate]:
        searches.append(arguments)
        return iter(())

    monkeypatch.setattr(Search, "candidates", candidates)
    assert search_on(machine, config, machine.layout(config)).remedies().startswith("No tried setting fits")
    assert len(searches) == 1


def test_frugal_states_move_less() -> None:
    exact, frugal = (plan(limited(0.1, optimizer_states=states), MACHINE) for states in ("fp32", "int8"))
    assert frugal.scratch_moved_per_step < 0.65 * exact.scratch_moved_per_step


@pytest.mark.parametrize("shard", [{"engine": "fsdp", "offload": "disk"}, {"engine": "deepspeed", "offload": "disk"}])
def test_other_engines_have_no_disk(shard: dict[str, object]) -> None:
    with pytest.raises(EngineError, match=r"shard\.offload: disk needs shard.engine: host"):
        plan(planned_config(LLAMA, shard=shard), MACHINE)


def test_train_names_disks_that_are_too_small(tmp_path: Path) -> None:
    run = {"directory": str(tmp_path / "runs" / "name")}
    config = planned_config(LLAMA, checkpoint={"every": 1}, train={"max_steps": 9}, run=run)
    made = plan(config, MACHINE)
    assert full_disks(config, made) == []
    huge = vars(made) | {"checkpoint_bytes": 1 << 60}
    only_export = config.model_copy(update={"checkpoint": type(config.checkpoint)(every=0, last=False)})
    assert full_disks(only_export, type(made)(**huge)) == []
    (line,) = full_disks(config, type(made)(**huge))
    assert line.startswith(f"{tmp_path}/runs/name has ") and "3 checkpoints take 3458764513.82 GB" in line
    before_the_last = config.model_copy(update={"checkpoint": type(config.checkpoint)(every=5, last=False)})
    assert "1 checkpoint take" in full_disks(before_the_last, type(made)(**huge))[0]
    assert line.endswith(" GB: set another run.directory") and "GB and the export takes " in line
    assert full_disks(before_the_last, type(made)(**huge), done=5) == []


def test_remedy_of_fewer_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections: dict[str, Any] = {"train": {"max_steps": 9}, "run": {"directory": str(tmp_path)}}
    config = planned_config(LLAMA, checkpoint={"every": 1, "export": False}, **sections)
    made = replace(plan(config, MACHINE), checkpoint_bytes=10**9, export_bytes=0)
    for free, helps in ((25, "set checkpoint.keep=1, or another run.directory"), (15, "set another run.directory")):
        found = SimpleNamespace(f_blocks=1, f_bavail=free, f_frsize=10**8)
        monkeypatch.setattr(os, "statvfs", lambda path, found=found: found)
        assert full_disks(config, made) == [
            f"{tmp_path} has {free / 10:.2f} GB free, and 3 checkpoints take 3.00 GB: {helps}"
        ]


GIB = 1 << 30
SPARE = 1.05
MODEL = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory group below this process's, of version 1 or 2."""
    above = next(control_groups("memory"), None)
    if above is None:
        pytest.skip("no control group of memory is mounted")
    own = above / f"aliquot-{uuid4().hex}"
    try:
        own.mkdir()
        _limit_file(own)
    except OSError:
        pytest.skip("no control group can be made here")
    yield own
    own.rmdir()


def _limit_file(group: Path) -> Path:
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (group / name).exists():
            return group / name
    group.rmdir()
    raise OSError("the memory controller is not enabled in the group")


def _plan(config: Path, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "aliquot", "plan", str(config), *overrides, "--json"]
    plan: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert plan["fits"]
    return plan


def _train_within(group: Path, plan: dict[str, Any], config: Path, *overrides: str) -> str:
    """Trains in a group of what `plan` foresees and five hundredths more; what is printed. `{limit}`: in GiB."""
    limit = int(SPARE * (plan["ranks_per_node"] * plan["peak_bytes_per_rank"] + plan["beside_bytes"]))
    _limit_file(group).write_text(str(limit))

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    words = [word.format(limit=limit / GIB) for word in overrides]
    command = [sys.executable, "-m", "aliquot", "train", str(config), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=enter, cwd=config.parent)
    assert done.returncode == 0, done.stderr
    events = (read_text(group / "memory.oom_control") or "") + (read_text(group / "memory.events") or "")
    assert "oom_kill 0" in events
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpointing", "memory", "freeze", "frozen_shapes"),
    [("none", 1.7, [], 0), ("auto", 1.5, ["model.layers.*.mlp.*"], 2)],
)
def test_planned_peak_plus_5_percent_suffices(
    tmp_path: Path, group: Path, checkpointing: str, memory: float, freeze: list[str], frozen_shapes: int
) -> None:
    config = tmp_path / "run.yaml"
    values = {
        "run": {"name": "run", "directory": str(tmp_path / "run")},
        "model": {"config": MODEL},
        "data": {"path": "stdlib", "tokenizer_vocab_size": 4096, "sequence_length": 256},
        "train": {
            "max_steps": 4,
            "global_batch_size": 2,
            "per_device_train_batch_size": 1,
            "precision": "fp32",
            "gradient_checkpointing": checkpointing,
            "freeze": freeze,
        },
        "shard": {"engine": "host", "offload": "disk"},
        "launch": {"ranks": 2, "device": "cpu"},
        "checkpoint": {"every": 2},
        "observe": {"report_to": []},
    }
    config.write_text(yaml.safe_dump(values))
    plan = _plan(config, f"shard.memory={memory}")
    assert plan["gradient_checkpointing"] == ("full" if checkpointing == "auto" else checkpointing)
    assert len(plan["on_disk"]["frozen"]) == frozen_shapes
    assert plan["on_disk"]["layers"] == 8, "all layers are to be on disk: no plan holds less"
    assert "8 layers whole" in _train_within(group, plan, config, "shard.memory={limit}")


@pytest.mark.long
@pytest.mark.parametrize("engine", ["host", "fsdp"])
@pytest.mark.parametrize("vocabulary", [4096, 128256])
def test_so_they_are_with_evaluation_export_and_a_sample(
    tmp_path: Path, group: Path, engine: str, vocabulary: int
) -> None:
    config = tmp_path / "run.yaml"
    values = {
        "run": {"name": "run", "directory": str(tmp_path / "run")},
        "model": {"config": {**MODEL, "num_hidden_layers": 2, "hidden_size": 384, "vocab_size": vocabulary}},
        "data": {
            "path": "stdlib", "tokenizer_vocab_size": 4096, "sequence_length": 512, "packing": True,
            "eval_fraction": 0.002,
        },
        "train": {
            "max_steps": 4, "global_batch_size": 4, "per_device_train_batch_size": 2, "precision": "fp32",
            "eval_steps": 2,
        },
        "shard": {"engine": engine},
        "launch": {"ranks": 2, "device": "cpu"},
        "checkpoint": {"every": 2},
        "observe": {"report_to": ["tensorboard"], "sample_prompt": "def "},
    }  # fmt: skip
    config.write_text(yaml.safe_dump(values))
    _train_within(group, _plan(config), config)
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
