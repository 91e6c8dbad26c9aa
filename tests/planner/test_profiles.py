"""This machine is measured once, for the ranks and threads at hand, and plans and the ceiling of MFU go by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import aliquot
from aliquot.distributed.topology import RankLayout
from aliquot.machine.cpu import read_cpu
from aliquot.observe import recorder
from aliquot.planner import calibrate, compute_ceiling, profiles
from aliquot.planner.measure_rates import Effort, measure_rates, medians
from aliquot.planner.planned_machine import Machine
from tests.conftest import RATES
from tests.runs import trained, write_config

LITTLE = Effort((32, 64, 256), 20.0, (1 << 16,), 0.001, 8 << 20, 1 << 20)
ONE = RankLayout(1, 1, 1, "cpu")


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of a machine that nobody measured."""
    monkeypatch.setenv("ALIQUOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "machines"


def test_all_that_plans_ask_for_is_measured() -> None:
    tables = measure_rates(lambda value: value, LITTLE)
    assert tables.keys() == RATES.keys() and tables["memory"].keys() == RATES["memory"].keys()
    assert [side for side, _ in tables["products"]["4"]] == [32, 64, 256]
    assert [sources for sources, _ in tables["sums"]["fp32"]] == [2, 4] and all(tables["updates"].values())
    assert all(rate > 0 for table in (*tables["products"].values(), *tables["memory"].values()) for _, rate in table)
    assert profiles.ceiling(tables, 4) == max(rate for _, rate in tables["products"]["4"])


def test_a_core_that_another_process_shares_evenly_is_told_as_busy() -> None:
    """Then all products are slow alike: by their times it looks as if the core was."""
    every = os.sched_getaffinity(0)
    core = min(every)
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            os.sched_setaffinity(0, {core})  # of this thread
            tables = measure_rates(lambda value: value, replace(LITTLE, each_s=0.05))
        finally:
            os.sched_setaffinity(0, every)
            other.kill()
    assert tables["spread"] > 0.3


def test_products_that_would_take_long_are_left_out_by_all_ranks_alike() -> None:
    """One rank may be slow: the slowest decides, or the others would wait for it in products that it leaves out."""
    tables = measure_rates(lambda value: value or 1.0, Effort((32, 64), 4.0, (1 << 16,), 0.001, 8 << 20, 1 << 20))
    assert [len(table) for table in tables["products"].values()] == [2, 2]
    slow = measure_rates(
        lambda value: 1.0 if value else 0.0, Effort((32, 64), 4.0, (1 << 16,), 0.001, 8 << 20, 1 << 20)
    )
    assert [len(table) for table in slow["products"].values()] == [1, 1]


def test_medians_are_of_each_number() -> None:
    assert medians([{"a": [1.0, 8.0]}, {"a": [3.0, 2.0]}, {"a": [2.0, 4.0]}]) == {"a": [2.0, 4.0]}


def test_a_plan_measures_an_unknown_machine_once(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "QUICK", LITTLE)
    machine = Machine.this()
    assert profiles.rates_of(machine, ONE) is None
    calibrate.make_known(machine, RankLayout(1, 2, 1, "cpu"))
    (kept,) = unknown.iterdir()
    assert json.loads(kept.read_text())["ranks"] == 2
    monkeypatch.setattr(calibrate, "measure_rates", None)
    calibrate.make_known(machine, ONE)  # what is known of two ranks is enough to plan one
    rates = profiles.rates_of(machine, ONE)
    assert rates is not None and "measured on this machine" in rates.source
    assert ", of 2 x 1 threads" in rates.source and rates.off_by > 1, "scaled, and said to be"
    calibrate.make_known(Machine.of_instance("c7i.8xlarge"), ONE)  # not this one: nothing can be measured of it


def test_rates_of_other_threads_follow_from_the_nearest(unknown: Path) -> None:
    cpu = read_cpu()
    profiles.keep_quick(cpu, 1, 1, RATES)
    one, two = (
        profiles.rates_of(Machine.this(cpu), RankLayout(1, 1, threads, "cpu")) for threads in (1, cpu.usable_cores)
    )
    assert one is not None and two is not None
    assert one.matmul_s(1, 512, 512, 512, 2) == pytest.approx(
        cpu.usable_cores * two.matmul_s(1, 512, 512, 512, 2), rel=1e-6
    )
    assert one.overhead_s(1) == two.overhead_s(1)


def test_a_network_that_nobody_told_of_is_said_to_be_assumed(unknown: Path) -> None:
    cpu = read_cpu()
    profiles.keep_quick(cpu, 1, 1, RATES)
    for nodes, network, assumed in ((1, None, False), (2, None, True), (2, 1e9, False)):
        machine = replace(Machine.this(cpu), network_bytes_per_s=network)
        rates = profiles.rates_of(machine, RankLayout(nodes, 1, 1, "cpu"))
        assert rates is not None
        assert ("10 Gbit/s between hosts assumed" in rates.source) == (rates.off_by > 1) == assumed


def test_a_thorough_profile_goes_before_a_quick_one(unknown: Path) -> None:
    cpu = read_cpu()
    profiles.keep_quick(cpu, 1, 1, RATES)
    profiles.keep_thorough(cpu, {**RATES, "call_s": 1.0}, RATES)
    rates = profiles.rates_of(Machine.this(cpu), ONE)
    assert rates is not None and rates.overhead_s(1) == 1.0


def slowed(by: float) -> dict[str, Any]:
    products = {size: [[side, rate / by] for side, rate in table] for size, table in RATES["products"].items()}
    return {**RATES, "products": products}


def made_older(path: Path, seconds: float) -> None:
    profile = json.loads(path.read_text())
    path.write_text(json.dumps({**profile, "at": profile["at"] - seconds}))


def test_what_was_measured_an_hour_ago_is_measured_again(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, machine = read_cpu(), Machine.this()
    path = profiles.keep_quick(cpu, 1, 1, RATES)
    made_older(path, 3000)
    assert profiles.quick(cpu, 1, 1) == RATES and profiles.known(machine, ONE)
    made_older(path, 1000)
    assert profiles.quick(cpu, 1, 1) is None and not profiles.known(machine, ONE)
    rates = profiles.rates_of(machine, ONE)
    assert rates is not None and rates.overhead_s(1) == RATES["call_s"]  # better than an estimate
    profiles.keep_quick(cpu, 1, 2, {**RATES, "call_s": 7.0})
    rates = profiles.rates_of(machine, ONE)
    assert rates is not None and rates.overhead_s(1) == 7.0  # of other threads, but of now
    made_older(profiles.keep_thorough(cpu, RATES, RATES), 4000)
    assert profiles.known(machine, ONE)
    made_older(next(unknown.glob("*-1x2.json")), 4000)
    monkeypatch.setattr(calibrate, "QUICK", LITTLE)
    calibrate.make_known(machine, ONE)
    assert profiles.known(machine, ONE)


@pytest.mark.parametrize(("by", "goes_first"), [(1.2, "thorough"), (0.8, "thorough"), (2.0, "quick"), (0.5, "quick")])
def test_a_thorough_profile_of_a_machine_that_has_changed_is_passed_over(
    unknown: Path, by: float, goes_first: str
) -> None:
    cpu, machine = read_cpu(), Machine.this()
    cores = cpu.usable_cores
    whole = {**RATES, "products": slowed(1 / cores)["products"]}

    def first() -> str:
        rates = profiles.rates_of(machine, RankLayout(1, cores, 1, "cpu"))
        assert rates is not None
        return "thorough" if rates.overhead_s(1) == RATES["call_s"] else "quick"

    path = profiles.keep_quick(cpu, cores, 1, {**slowed(by), "call_s": 7.0})
    thorough = profiles.keep_thorough(cpu, RATES, whole)
    assert first() == "thorough"  # the newer one
    made_older(thorough, 10)
    assert first() == goes_first
    profiles.keep_quick(cpu, cores, 1, {**slowed(by), "call_s": 7.0, "spread": 0.5})
    assert first() == "thorough"  # for now: the machine is busy with something else
    path.unlink()
    profiles.keep_quick(cpu, 1, cores, {**RATES, "products": slowed(by / cores)["products"], "call_s": 7.0})
    assert first() == goes_first
    if cores > 1:
        next(unknown.glob(f"*-1x{cores}.json")).unlink()
        profiles.keep_quick(cpu, 1, 1, {**slowed(by), "call_s": 7.0})
        assert first() == "thorough"  # a core alone is faster anyway


def test_ranks_that_share_cores_have_less_than_their_part_of_them(unknown: Path) -> None:
    cpu = read_cpu()
    machine, cores = Machine.this(cpu), cpu.usable_cores
    alone, shared = RankLayout(1, cores, 1, "cpu"), RankLayout(1, 2 * cores, 1, "cpu")

    def compared() -> tuple[float, float, float]:
        of_alone, of_shared = (profiles.rates_of(machine, layout) for layout in (alone, shared))
        assert of_alone is not None and of_shared is not None
        products = of_shared.matmul_s(1, 256, 256, 256, 4) / of_alone.matmul_s(1, 256, 256, 256, 4)
        calls = of_shared.overhead_s(1) / of_alone.overhead_s(1)
        return products, of_shared.stage_s(1e9) / of_alone.stage_s(1e9), calls

    known = pytest.approx((2 / 0.93, 2 / 0.93, 2 / 0.8))
    profiles.keep_quick(cpu, 2 * cores, 1, RATES)
    assert compared() == known  # measured where they are shared, planned where they are not
    profiles.keep_thorough(cpu, RATES, RATES)
    assert compared() == known
    shared = RankLayout(1, 1, 2 * cores, "cpu")
    assert compared()[2] == 1, "the one thread that makes calls has a core"


def test_gloo_has_a_shared_core_no_faster_than_who_computes_on_it(unknown: Path) -> None:
    cpu = read_cpu()
    profiles.keep_quick(cpu, cpu.usable_cores, 1, RATES)
    own, shared = (
        profiles.rates_of(Machine.this(cpu), RankLayout(1, count * cpu.usable_cores, 1, "cpu")) for count in (1, 2)
    )
    assert own is not None and shared is not None
    assert own.gloo_s(1.4e9) == pytest.approx(2) and shared.gloo_s(1.4e9) == pytest.approx(4 / 0.93)


def test_a_busy_machine_and_an_older_profile_are_measured_again(unknown: Path) -> None:
    cpu = read_cpu()
    path = profiles.keep_quick(cpu, 2, 1, RATES)
    assert profiles.quick(cpu, 2, 1) == RATES
    assert profiles.quick(cpu, 1, 1) is None  # other ranks reach something else
    path.write_text(path.read_text().replace(f'"format": {profiles.FORMAT}', '"format": 1'))
    assert profiles.quick(cpu, 2, 1) is None
    profiles.keep_quick(cpu, 2, 1, {**RATES, "spread": 0.5})
    assert profiles.quick(cpu, 2, 1) is None
    rates = profiles.rates_of(Machine.this(cpu), ONE)
    assert rates is not None and rates.source.endswith("the machine was busy")  # better than an estimate
    profiles.keep_quick(cpu, 1, 2, {**RATES, "spread": 0.5, "call_s": 7.0})
    profiles.keep_quick(cpu, 1, 4, {**RATES, "call_s": 8.0})
    rates = profiles.rates_of(Machine.this(cpu), RankLayout(1, 1, 2, "cpu"))
    assert rates is not None and rates.overhead_s(1) == 8.0  # of more threads, but undisturbed


@pytest.mark.parametrize(
    "broken",
    [
        *([], "x", None, [1]),
        *({key: wrong} for key, wrong in (("at", None), ("ranks", 0), ("threads", "x"), ("tables", {}))),
        *({"tables": {**RATES, "call_s": wrong}} for wrong in (0, -1, float("nan"), float("inf"), None)),
        {"tables": {key: value for key, value in RATES.items() if key != "stage"}},
        {"tables": {**RATES, "memory": {**RATES["memory"], "permute": []}}},
        {"tables": {**RATES, "products": {"2": [[128.0, 0.0]], "4": [[128.0, 1e11]]}}},
    ],
    ids=repr,
)
def test_a_file_that_is_no_profile_is_measured_again(unknown: Path, broken: Any) -> None:
    cpu, machine = read_cpu(), Machine.this()
    path = profiles.keep_quick(cpu, 1, 1, RATES)
    assert profiles.known(machine, ONE)
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, **broken} if isinstance(broken, dict) else broken))
    assert profiles.quick(cpu, 1, 1) is None and not profiles.known(machine, ONE)
    assert profiles.rates_of(machine, ONE) is None


def test_a_rank_of_one_thread_may_have_left_out_larger_products_than_one_of_all_cores(unknown: Path) -> None:
    few = {size: table[:1] for size, table in RATES["products"].items()}
    for core, every in ((few, RATES["products"]), (RATES["products"], few)):
        profiles.keep_thorough(read_cpu(), {**RATES, "of_layers": core}, {**RATES, "of_layers": every})
        rates = profiles.rates_of(Machine.this(), ONE)
        assert isinstance(rates, profiles.Measured) and [side for side, _ in rates.products[4]] == [128.0]


@pytest.mark.long
def test_a_run_measures_its_machine_and_a_second_one_does_not(unknown: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, launch={"ranks": 2}, train={"max_steps": 1})
    ceilings, kept = [], []
    for name in ("first", "second"):
        trained(config, f"run.directory={tmp_path / name}")
        lines = (tmp_path / name / "events.jsonl").read_text().splitlines()
        ceilings.append(json.loads(lines[0])["ceiling_flops_per_s"])
        (file,) = unknown.iterdir()
        profile = json.loads(file.read_text())
        assert (profile["ranks"], profile["threads"]) == (2, 1)
        profile["tables"]["spread"] = 0.0  # measured beside other tests, it may have been thought busy
        file.write_text(json.dumps(profile))
        kept.append(file.read_text())
    assert ceilings[0] == ceilings[1] > 0 and kept[0] == kept[1]


def test_a_ceiling_that_steps_beat_is_measured_again(unknown: Path, tmp_path: Path) -> None:
    cpu = read_cpu()
    low = {size: [[128.0, 1.0]] for size in ("2", "4")}
    profiles.keep_quick(cpu, 1, cpu.usable_cores, {**RATES, "products": low})
    trained(write_config(tmp_path, train={"max_steps": 3}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["flops_per_s"] > 1  # floating-point operations: the ceiling that was known
    assert 0 < lines[0]["mfu"] < 1 and 0 < lines[1]["mfu"] < 1
    tables = profiles.quick(cpu, 1, cpu.usable_cores) or json.loads(next(unknown.iterdir()).read_text())["tables"]
    assert profiles.ceiling(tables, 4) > 1e6  # and later runs know it


def test_the_ceiling_of_a_machine_that_was_busy_is_measured_again(
    unknown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, some time later."""
    high = {size: [[128.0, 1e18]] for size in ("2", "4")}
    found = [{**RATES, "products": high, "spread": 0.0}, {**RATES, "spread": 0.5}]
    monkeypatch.setattr(calibrate, "measure_rates", lambda *_: found[-1])
    monkeypatch.setattr(compute_ceiling, "measure_rates", lambda *_: found.pop())
    monkeypatch.setattr(recorder, "_REMEASURE_AFTER_S", 0.0)
    aliquot.train(aliquot.read_config(write_config(tmp_path, train={"max_steps": 3})))
    assert not found
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [row["mfu"] < 1e-6 for row in map(json.loads, lines) if "mfu" in row][-1]


def test_sums_take_longer_the_more_ranks_there_are(unknown: Path) -> None:
    """Measured of two and four ranks, told of any number; what one more takes is never less than nothing."""
    cpu, machine = read_cpu(), Machine.this()
    for of_four, expected in ((4e8, [1.75, 2.0, 2.5, 4.5]), (8e8, [2.0, 2.0, 2.0, 2.0])):
        sums = {kept: [[2.0, 5e8], [4.0, of_four]] for kept in ("fp32", "bf16")}
        profiles.keep_quick(cpu, 1, 1, {**RATES, "sums": sums})
        rates = profiles.rates_of(machine, ONE)
        assert rates is not None
        assert [rates.sum_s(4, count, 1e9) for count in (1, 2, 4, 12)] == pytest.approx(expected)
        assert rates.update_s("int8", 1e8, 1.0, False) == pytest.approx(1.0)
        assert rates.update_s("fp32", 1e8, 5e9, True) == pytest.approx(1.0)  # by the bytes that it moves


@pytest.mark.parametrize(
    ("operation", "kind"),
    [("tanh_", "tanh"), ("gelu_backward", "tanh"), ("tanh_backward", "add"), ("silu", "silu"), ("exp_", "silu"),
     ("copy_", "copy"), ("fill_", "copy"), ("mul_", "add"), ("_softmax_backward_data", "softmax"), ("sum", "sum")],
)  # fmt: skip
def test_operations_in_place_and_of_the_way_back_are_as_fast_as_what_they_are(operation: str, kind: str) -> None:
    """A soft-cap's tanh_ was taken for an addition, and is ten times as slow."""
    assert profiles._kind(operation) == kind
