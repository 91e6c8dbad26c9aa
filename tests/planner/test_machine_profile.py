"""Measured rates of this machine: measurement, profiles in the cache, and the ceiling of MFU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import aliquot
from aliquot.core.decode import publish_checked_json, read_checked_json
from aliquot.distributed.topology import RankLayout
from aliquot.machine.cpu import read_cpu
from aliquot.observe import recorder
from aliquot.planner import compute_ceiling, machine_profile, rates
from aliquot.planner.machine_profile import keep, measured_rates, recent
from aliquot.planner.measure_rates import Effort, measure_rates, median_measurement
from aliquot.planner.planned_machine import Machine
from tests.conftest import RATES
from tests.runs import trained, write_config

LITTLE = Effort((32, 64, 256), 20.0, (1 << 16,), 0.001, 8 << 20)
ONE = RankLayout(1, 1, 1, "cpu")


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of a machine that nobody measured."""
    monkeypatch.setenv("ALIQUOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "machines"


def known(machine: Machine, layout: RankLayout = ONE) -> rates.Rates:
    """The measured rates of a machine that somebody measured."""
    rates = measured_rates(machine, layout)
    assert rates is not None
    return rates


def test_measurement_has_all_rates() -> None:
    measured = measure_rates(lambda value: value, LITTLE)
    values = json.loads(json.dumps(asdict(measured)))
    assert values.keys() == RATES.keys() and values["memory"].keys() == RATES["memory"].keys()
    assert [side for side, _ in measured.products[4]] == [32, 64, 256]
    curves = (*measured.products.values(), *measured.memory.values())
    assert all(rate > 0 for curve in curves for _, rate in curve)
    profile = machine_profile.profile_of(1, 1, values)
    assert profile.rates == measured and profile.ceiling(4) == max(rate for _, rate in measured.products[4])


def test_shared_core_counts_as_busy() -> None:
    """Then all products are slow alike: by their times it looks as if the core was."""
    every = os.sched_getaffinity(0)
    core = min(every)
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            os.sched_setaffinity(0, {core})  # of this thread
            measured = measure_rates(lambda value: value, replace(LITTLE, seconds_each=0.05))
        finally:
            os.sched_setaffinity(0, every)
            other.kill()
    assert measured.spread > 0.3


def test_all_ranks_skip_the_same_slow_products() -> None:
    """One rank may be slow: the slowest decides, or the others would wait for it in products that it leaves out."""
    effort = Effort((32, 64), 4.0, (1 << 16,), 0.001, 8 << 20)
    measured = measure_rates(lambda value: value or 1.0, effort)
    assert [len(curve) for curve in measured.products.values()] == [2, 2]
    slow = measure_rates(lambda value: 1.0 if value else 0.0, effort)
    assert [len(curve) for curve in slow.products.values()] == [1, 1]


def test_median_measurement_is_elementwise() -> None:
    assert median_measurement([{"a": [1.0, 8.0]}, {"a": [3.0, 2.0]}, {"a": [2.0, 4.0]}]) == {"a": [2.0, 4.0]}


def test_plan_measures_an_unknown_machine_once(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profile, "QUICK", LITTLE)
    monkeypatch.setattr(machine_profile, "_BUSY", math.inf)  # other tests are other work
    machine = Machine.local()
    assert measured_rates(machine, ONE) is None
    machine_profile.ensure_measured(machine, RankLayout(1, 2, 1, "cpu"))
    (kept,) = unknown.iterdir()
    assert json.loads(kept.read_text())["ranks"] == 2
    monkeypatch.setattr(machine_profile, "measure_rates", None)
    machine_profile.ensure_measured(machine, ONE)  # the rates of two ranks are enough to plan one
    found = known(machine)
    assert "measured on this machine" in found.source
    assert ", of 2 x 1 threads" in found.source and found.off_by > 1.15, "scaled, with a wider band"
    machine_profile.ensure_measured(Machine.from_instance("c7i.8xlarge"), ONE)  # cannot be measured here


def test_unmeasured_threads_scale_the_nearest_profile(unknown: Path) -> None:
    cpu = read_cpu()
    keep(cpu, 1, 1, RATES)
    one, two = (known(Machine.local(cpu), RankLayout(1, 1, threads, "cpu")) for threads in (1, cpu.usable_cores))
    assert one.matmul_s(1, 512, 512, 512, 2) == pytest.approx(
        cpu.usable_cores * two.matmul_s(1, 512, 512, 512, 2), rel=1e-6
    )
    assert one.call_s == two.call_s


def test_unknown_network_is_called_assumed(unknown: Path) -> None:
    cpu = read_cpu()
    keep(cpu, 1, 1, RATES)
    for nodes, network, assumed in ((1, None, False), (2, None, True), (2, 1e9, False)):
        machine = replace(Machine.local(cpu), network_bytes_per_s=network)
        rates = known(machine, RankLayout(nodes, 1, 1, "cpu"))
        assert ("10 Gbit/s between hosts assumed" in rates.source) == (rates.off_by > 2) == assumed


def test_calibration_keeps_two_thorough_profiles(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profile, "THOROUGH", LITTLE)
    cores = read_cpu().usable_cores
    assert machine_profile.calibrate() == unknown
    assert {path.name.partition("-")[2] for path in unknown.iterdir()} == {f"{cores}x1.json", f"1x{cores}.json"}
    assert "takes its time" not in known(Machine.local(), RankLayout(1, cores, 1, "cpu")).source


def made_older(path: Path, seconds: float) -> None:
    profile = read_checked_json(path) or {}
    publish_checked_json(path, {**profile, "at": profile["at"] - seconds})


def test_quick_profiles_expire_after_an_hour(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, machine = read_cpu(), Machine.local()
    path = keep(cpu, 1, 1, RATES)
    made_older(path, 3000)
    assert recent(cpu, 1, 1) is not None and machine_profile.is_measured(machine, ONE)
    made_older(path, 1000)
    assert recent(cpu, 1, 1) is None and not machine_profile.is_measured(machine, ONE)
    assert known(machine).call_s == RATES["call_s"]  # better than an estimate
    keep(cpu, 1, 2, {**RATES, "call_s": 7.0})
    assert known(machine).call_s == 7.0  # of other threads, but of now
    made_older(keep(cpu, 1, 1, RATES, thorough=True), 4000)
    assert known(machine).call_s == RATES["call_s"], "a thorough profile does not expire"
    for profile in unknown.iterdir():
        profile.unlink()
    monkeypatch.setattr(machine_profile, "QUICK", LITTLE)
    monkeypatch.setattr(machine_profile, "_BUSY", math.inf)
    machine_profile.ensure_measured(machine, ONE)
    assert machine_profile.is_measured(machine, ONE)


def test_oversubscribed_ranks_share_cores(unknown: Path) -> None:
    cpu = read_cpu()
    machine, cores = Machine.local(cpu), cpu.usable_cores
    alone, shared = RankLayout(1, cores, 1, "cpu"), RankLayout(1, 2 * cores, 1, "cpu")

    def compared() -> tuple[float, float, float, float]:
        of_alone, of_shared = (known(machine, layout) for layout in (alone, shared))
        products = of_shared.matmul_s(1, 256, 256, 256, 4) / of_alone.matmul_s(1, 256, 256, 256, 4)
        calls = of_shared.call_s / of_alone.call_s
        return (
            products,
            of_shared.states_s(1e9) / of_alone.states_s(1e9),
            calls,
            of_alone.gloo_bytes_per_s / of_shared.gloo_bytes_per_s,
        )

    keep(cpu, 2 * cores, 1, RATES)
    assert compared() == pytest.approx((2, 2, 2, 2))  # measured where they are shared, planned where they are not
    shared = RankLayout(1, 1, 2 * cores, "cpu")
    assert compared()[2] == 1, "the one thread that makes calls has a core"


def test_busy_and_old_profiles_are_measured_again(unknown: Path) -> None:
    cpu = read_cpu()
    path = keep(cpu, 2, 1, RATES)
    assert recent(cpu, 2, 1) is not None
    assert recent(cpu, 1, 1) is None  # other ranks have other rates
    publish_checked_json(path, {**(read_checked_json(path) or {}), "format": 1})
    assert recent(cpu, 2, 1) is None
    machine, busy, same = Machine.local(cpu), {**RATES, "spread": 1.0, "call_s": 6.0}, RankLayout(1, 2, 1, "cpu")
    keep(cpu, 2, 1, busy, thorough=True)
    assert recent(cpu, 2, 1) is None and not machine_profile.is_measured(machine, same)
    rates = known(machine, same)
    assert rates.source.endswith("the machine was busy")  # better than an estimate
    assert rates.off_by == 3 and not rates.is_sure, "other work took half of the cores"
    for seconds, off_by in ((0, 1.15), (4000, 1.5)):
        made_older(keep(cpu, 2, 1, RATES), seconds)
        rates = known(machine, keep(cpu, 2, 1, busy) and same)
        assert (rates.call_s, rates.off_by) == (RATES["call_s"], off_by), "of the idle machine"
    path.unlink()
    keep(cpu, 1, 2, {**RATES, "spread": 0.5, "call_s": 7.0})
    keep(cpu, 1, 4, {**RATES, "call_s": 8.0})
    assert known(Machine.local(cpu), RankLayout(1, 1, 2, "cpu")).call_s == 8.0  # of more threads, but undisturbed


@pytest.mark.parametrize(
    "broken",
    [
        *([], "x", None, [1], "[" * 200_000),
        *({key: wrong} for key, wrong in (("at", None), ("ranks", 0), ("threads", "x"), ("rates", {}))),
        *({"rates": {**RATES, "call_s": wrong}} for wrong in (0, -1, float("nan"), float("inf"), None)),
        {"rates": {key: value for key, value in RATES.items() if key != "call_s"}},
        {"rates": {**RATES, "memory": {**RATES["memory"], "exp": []}}},
        {"rates": {**RATES, "memory": {"exp": [[1e6, 1e10]]}}},
        {"rates": {**RATES, "products": {"2": [[128.0, 0.0]], "4": [[128.0, 1e11]]}}},
    ],
    ids=lambda broken: repr(broken)[:80],
)
def test_invalid_profile_is_measured_again(unknown: Path, broken: Any) -> None:
    cpu, machine = read_cpu(), Machine.local()
    path = keep(cpu, 1, 1, RATES)
    assert machine_profile.is_measured(machine, ONE)
    if isinstance(broken, dict):
        publish_checked_json(path, {**(read_checked_json(path) or {}), **broken})
    else:
        path.write_text(broken if isinstance(broken, str) else json.dumps(broken))
    assert recent(cpu, 1, 1) is None and not machine_profile.is_measured(machine, ONE)
    assert measured_rates(machine, ONE) is None


@pytest.mark.long
def test_only_the_first_run_measures_the_machine(unknown: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, launch={"ranks": 2}, train={"max_steps": 1})
    ceilings, kept = [], []
    for name in ("first", "second"):
        trained(config, f"run.directory={tmp_path / name}")
        lines = (tmp_path / name / "events.jsonl").read_text().splitlines()
        ceilings.append(json.loads(lines[0])["ceiling_flops_per_s"])
        (file,) = unknown.iterdir()
        profile = read_checked_json(file) or {}
        assert (profile["ranks"], profile["threads"]) == (2, 1)
        profile["rates"]["spread"] = 0.0  # measured beside other tests, it may have been thought busy
        publish_checked_json(file, profile)
        kept.append(file.read_text())
    assert ceilings[0] == ceilings[1] > 0 and kept[0] == kept[1]


@pytest.mark.long
def test_beaten_ceiling_is_measured_again(unknown: Path, tmp_path: Path) -> None:
    cpu = read_cpu()
    low = {size: [[128.0, 1.0]] for size in ("2", "4")}
    keep(cpu, 1, cpu.usable_cores, {**RATES, "products": low})
    trained(write_config(tmp_path, train={"max_steps": 3}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["flops_per_s"] > 1  # floating-point operations: the ceiling that was known
    assert 0 < lines[0]["mfu"] < 1 and 0 < lines[1]["mfu"] < 1
    (kept,) = unknown.iterdir()
    products = json.loads(kept.read_text())["rates"]["products"]
    assert max(rate for _, rate in products["4"]) > 1e6  # and later runs know it


@pytest.mark.long
def test_ceiling_of_a_busy_machine_is_measured_again(
    unknown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, some time later."""
    high = {size: [[128.0, 1e18]] for size in ("2", "4")}
    found = [
        machine_profile.profile_of(1, 1, values).rates
        for values in ({**RATES, "products": high, "spread": 0.0}, {**RATES, "spread": 0.5})
    ]
    monkeypatch.setattr(machine_profile, "measure_rates", lambda *_: found[-1])
    monkeypatch.setattr(compute_ceiling, "measure_rates", lambda *_: found.pop())
    monkeypatch.setattr(recorder, "_REMEASURE_AFTER_S", 0.0)
    aliquot.train(aliquot.read_config(write_config(tmp_path, train={"max_steps": 3})))
    assert not found
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [row["mfu"] < 1e-6 for row in map(json.loads, lines) if "mfu" in row][-1]


@pytest.mark.parametrize(
    ("operation", "kind"),
    [("tanh_", "exp"), ("gelu_backward", "exp"), ("tanh_backward", "stream"), ("silu", "exp"), ("exp_", "exp"),
     ("copy_", "stream"), ("fill_", "stream"), ("mul_", "stream"), ("_softmax_backward_data", "exp"),
     ("sum", "stream"), ("transpose", "transpose")],
)  # fmt: skip
def test_rate_kind_of_in_place_and_backward_operations(operation: str, kind: str) -> None:
    """A soft-cap's tanh_ was taken for an addition, and is ten times as slow."""
    assert rates._kind(operation) == kind
