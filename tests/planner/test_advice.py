"""Advice on a bottleneck: it can be pasted after the config, and gains as much as it promises."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from aliquot.config.read_config import read_config
from aliquot.data.workload import Workload
from aliquot.planner import fit_check
from aliquot.planner.advice import _fewer_ranks, _plans, with_advice
from aliquot.planner.automatic_settings import with_choices
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from aliquot.planner.settings_search import Search
from tests.planner.shapes import LLAMA, planned_config

SLOW = Machine.from_numbers(64, 16, 0.1)


@pytest.mark.parametrize(
    ("train", "ranks", "settings"),
    [
        ({"global_batch_size": 4}, "auto", {"train.global_batch_size", "launch.ranks"}),
        (
            {"global_batch_size": 16, "gradient_accumulation_steps": 2},
            2,
            {"train.global_batch_size", "train.gradient_accumulation_steps"},
        ),
        (
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            2,
            {"train.global_batch_size", "train.gradient_accumulation_steps"},
        ),
        ({"global_batch_tokens": 2048}, 2, {"train.global_batch_size", "train.global_batch_tokens"}),
        (
            {"global_batch_size": 4, "per_device_train_batch_size": 8},
            1,
            {"train.global_batch_size", "train.per_device_train_batch_size"},
        ),
    ],
    ids=lambda value: None if isinstance(value, set) else str(value),
)
def test_advised_batch_can_be_pasted(
    tmp_path: Path, train: dict[str, int], ranks: int | str, settings: set[str]
) -> None:
    file, sections = tmp_path / "run.yaml", {"model": {"config": LLAMA}, "data": {"path": "stdlib"}}
    sections["data"] |= {"sequence_length": 512}
    launch: dict[str, Any] = {"device": "cpu", "ranks": ranks}
    file.write_text(yaml.safe_dump({**sections, "train": {"max_steps": 10, **train}, "launch": launch}))
    config = read_config(file)
    planner, layout, workload = Planner(PlannedModel(config), SLOW), SLOW.layout(config, 2), Workload.assumed(config)
    now = planner.plan(config, layout, workload, approximate=True)
    search = Search(planner, with_choices(config, now.choices), layout, workload)
    told = with_advice(now, search, config).bottleneck
    found = re.search(r"a global batch of \d+ sequences \((.+)\) would be ([\d.]+)x", told)
    assert found, told
    lines = found[1].split()
    assert {line.partition("=")[0] for line in lines} == settings
    pasted = read_config(file, lines)
    then = planner.plan(pasted, SLOW.layout(pasted, 2), workload, approximate=True)
    gain, promised = round(then.tokens_per_s / now.tokens_per_s, 1), float(found[2])
    # The advice keeps the micro-batch; `auto` may choose a faster one for the larger batch.
    assert gain == promised if "per_device_train_batch_size" in train else gain >= promised


def test_advice_of_fewer_ranks_makes_engine_host_fit() -> None:
    config = planned_config(LLAMA, launch={"ranks": "auto", "threads_per_rank": None})
    planner, workload = Planner(PlannedModel(config), SLOW), Workload.assumed(config)
    layout = SLOW.layout(config, 2)
    of_one, of_all = (
        planner.plan(config, SLOW.layout(config, 2, ranks), workload, approximate=True)
        for ranks in (1, layout.ranks_per_node)
    )
    needed = [each.peak_bytes_per_rank * each.ranks_per_node + each.beside_bytes for each in (of_one, of_all)]
    assert of_one.engine == of_all.engine == "host" and needed[0] < needed[1]
    less = replace(SLOW, memory_bytes=sum(needed) // 2)
    planner = Planner(PlannedModel(config), less)
    assert fit_check.problems(planner.plan(config, layout, workload), less)
    search = Search(planner, config, layout, workload)
    helps = {words: made for words, made in _plans(_fewer_ranks(search, {}), search)}
    assert helps["launch.ranks=1"].engine == "host" and helps["launch.ranks=1"].fits
