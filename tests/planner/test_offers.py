"""Offers over the catalogue: sorted, complete in tokens, with restarts, without dominated types."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from aliquot.catalogue.instances import instance, instances
from aliquot.cli.instances_command import instance_planner
from aliquot.cli.main import app
from aliquot.cluster.check import check_job_of_config
from aliquot.cluster.job import describe, placed
from aliquot.config.read_config import read_config
from aliquot.core.number_format import dollars, short
from aliquot.data.workload import BatchSize, Workload, batch_size
from aliquot.planner.automatic_settings import with_settings
from aliquot.planner.offers import (
    Offer,
    OfferRequest,
    Spot,
    _best_interval,
    _restart_s,
    _undominated_types,
    config_batch,
    offers,
    undominated,
)
from aliquot.planner.pictures import offers_svg, pareto_optimal
from tests.conftest import REPOSITORY

CONFIG = REPOSITORY / "examples" / "llama3-8b-cpu.yaml"
SETTINGS = read_config(CONFIG)
TOKENS = 10**8
SPOT = Spot(price=0.4, lost_a_month=0.2)


@pytest.fixture(scope="module")
def found() -> list[Offer]:
    return offers(
        SETTINGS, Workload.assumed(SETTINGS), OfferRequest(TOKENS, "cost", SPOT, [32], [1, 2], [1, 2], "c7i.24xlarge")
    )


def test_sorted_and_whole(found: list[Offer]) -> None:
    assert {(each.plan.nodes, each.capacity) for each in found} == {
        (nodes, capacity) for nodes in (1, 2) for capacity in ("spot", "on-demand")
    }
    costs = [each.usd for each in found]
    assert costs == sorted(costs)
    for each in found:
        assert TOKENS <= each.plan.steps * each.plan.tokens_per_step < TOKENS + each.plan.tokens_per_step
        assert each.plan.tokens_per_step == each.global_batch * 512 and each.plan.fits
    assert found[0].capacity == "spot"


def test_spot_offer_is_cheaper_and_slower(found: list[Offer]) -> None:
    by = {(each.plan.nodes, each.capacity): each for each in found}
    spot, sure = by[2, "spot"], by[2, "on-demand"]
    for offer, losses in ((sure, 0.1), (spot, 0.2)):
        assert offer.restarts == pytest.approx(losses * 2 * offer.total_s / (30 * 86400))
    lost_s = spot.total_s - spot.plan.total_s
    assert 300 * spot.restarts < lost_s  # a new node, and the checkpoint is read
    hourly = 0.4 * spot.plan.usd_per_hour + spot.plan.fees_usd_per_hour
    assert spot.usd == pytest.approx(hourly * spot.total_s / 3600) and spot.plan.fees_usd_per_hour > 0.1


def test_interval_is_the_best_of_its_neighbours(found: list[Offer]) -> None:
    """Young and Daly: half and twice the interval cost more, by saves and by repeated steps."""
    plan = replace(found[0].plan, steps=100_000, step_s=10.0, save_s=300.0)
    losses = 1e-4  # so frequent that no bound applies
    best = _best_interval(plan, losses)
    assert 1 < best < 2160

    def lost(every: int) -> float:
        return 300.0 / (every * 10.0) + losses * every * 10.0 / 2

    assert lost(best) < min(lost(best // 2), lost(best * 2))
    assert _best_interval(plan, losses / 1e9) * 10.0 == 6 * 3600
    assert _best_interval(plan, losses * 1e9) * 10.0 == 600  # a save takes at most half of the time
    assert _best_interval(replace(plan, steps=100), losses / 1e9) == 50  # once before the end


def test_both_kinds_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch.device: auto` has both in one table, and offers of CPU nodes end with the price of GPU nodes."""
    types = {kind: [ec2.name for ec2 in _undominated_types(kind)] for kind in ("cpu", "cuda", "auto")}
    assert set(types["auto"]) == {*types["cpu"], *types["cuda"]}
    few = {"cpu": ["c7i.24xlarge"], "cuda": ["p4d.24xlarge"], "auto": ["c7i.24xlarge", "p4d.24xlarge"]}
    monkeypatch.setattr(
        "aliquot.planner.offers._undominated_types", lambda kind: [instance(name) for name in few[kind]]
    )
    request = OfferRequest(TOKENS, "cost", SPOT, [32], [1], [8])
    config = with_settings(SETTINGS, {"launch.device": "auto"})
    assert {offer.plan.device for offer in offers(config, Workload.assumed(config), request)} == {"cpu", "cuda"}
    words = ["plan", str(CONFIG), "--tokens", "100M", "--nodes", "1", "--ranks-per-node", "8"]
    told = CliRunner().invoke(app, words).stdout
    assert re.search(r"^on GPUs from [\d.]+ USD \(1 x p4d.24xlarge, spot, [\d.]+ hours\)", told, re.M), told


def test_lost_node_costs_unsaved_steps(found: list[Offer]) -> None:
    """The step is finished first, then saved; without saves all since the start is lost."""
    plan = replace(found[0].plan, steps=1000, step_s=10.0, save_s=30.0, checkpoint_bytes=0)

    def lost_s(every: int, step_s: float = 10.0) -> float:
        saving = SETTINGS.checkpoint.model_copy(update={"every": every, "grace_s": 90.0})
        one = replace(plan, step_s=step_s)
        return _restart_s(SETTINGS.model_copy(update={"checkpoint": saving}), one, True) - _restart_s(
            SETTINGS.model_copy(update={"checkpoint": saving}), plan, True
        )

    assert lost_s(100) == 0
    assert lost_s(100, step_s=80.0) == pytest.approx(50 * 80.0)
    assert lost_s(0, step_s=80.0) == pytest.approx(500 * 80.0)


def test_all_offers_are_the_training_of_the_config() -> None:
    """Four nodes of two ranks with four micro-batches of one sequence, whatever the nodes of an offer."""
    workload = Workload.assumed(SETTINGS)
    made = offers(SETTINGS, workload, OfferRequest(TOKENS, "cost", SPOT, [], [1, 2], [1, 2], "c7i.24xlarge"))
    assert {offer.global_batch for offer in made} == {32} and {offer.plan.nodes for offer in made} == {1, 2}
    gpu = read_config(REPOSITORY / "examples" / "llama3-8b-gpu.yaml")
    on_gpus = with_settings(SETTINGS, {"launch.device": "cuda"})
    assert (config_batch(on_gpus, None), config_batch(gpu, None)) == (32, 128)
    request = OfferRequest(TOKENS, "cost", SPOT, [128], [1, 2], [1], "p5.48xlarge")
    first, second = ([(offer.usd, offer.arguments) for offer in offers(config, workload, request)]
                     for config in (on_gpus, gpu))  # fmt: skip
    assert [usd for usd, _ in first] == [usd for usd, _ in second]
    # The GPU example offloads, and on eight H100 the states fit.
    assert "shard.offload" not in first[0][1] and "shard.offload=none" in second[0][1]


def test_offers_pay_from_the_start_of_their_nodes(found: list[Offer]) -> None:
    for each in found:
        loading_s = 2 * each.plan.disk_read_bytes / each.plan.storage_bytes_per_s  # to the file system, and from it
        assert each.start_s == 300 + loading_s + (120 if each.plan.compile == "layers" else 0)
        assert each.total_s > each.start_s + each.plan.total_s


@pytest.mark.parametrize("capacity", ["on-demand", "spot"])
def test_the_check_has_nothing_against_an_offer(found: list[Offer], capacity: str) -> None:
    offer = next(each for each in found if each.capacity == capacity)
    settings = read_config(CONFIG, offer.arguments.split())
    plan = instance_planner(placed(settings))(str(offer.plan.instance), offer.plan.nodes)
    assert check_job_of_config(describe(settings, plan)) == []


def test_offer_arguments_give_the_offered_run(found: list[Offer]) -> None:
    for each in found:
        pasted = read_config(CONFIG, each.arguments.split())
        assert pasted.cluster is not None and pasted.cluster.instance_types == [each.plan.instance]
        assert (pasted.cluster.nodes, pasted.cluster.ranks_per_node) == (each.plan.nodes, each.plan.ranks_per_node)
        world = each.plan.nodes * each.plan.ranks_per_node
        assert batch_size(pasted.train, world) == BatchSize(each.global_batch, each.plan.micro_batch)
        assert pasted.train.max_steps == each.plan.steps


@pytest.mark.parametrize(
    ("more", "nodes", "ranks"),
    [([], 4, 2), (["--nodes", "2"], 2, 2), (["launch.nodes=3", "launch.ranks=8"], 3, 8)],
    ids=str,
)
def test_a_type_is_planned_on_the_nodes_of_the_cluster(more: list[str], nodes: int, ranks: int) -> None:
    told = json.loads(
        CliRunner().invoke(app, ["plan", str(CONFIG), "--instance", "c7i.24xlarge", "--json", *more]).stdout
    )
    assert (told["nodes"], told["ranks_per_node"]) == (nodes, ranks)


def test_time_is_money(found: list[Offer]) -> None:
    fast = offers(
        SETTINGS, Workload.assumed(SETTINGS), OfferRequest(TOKENS, "time", SPOT, [32], [1, 2], [1, 2], "c7i.24xlarge")
    )
    assert fast[0].plan.nodes == 2
    assert fast[0].total_s <= min(each.total_s for each in found)
    line = pareto_optimal([*found, *fast])
    assert [each.usd for each in line] == sorted((each.usd for each in line), reverse=True)
    picture = offers_svg(found, "a <title>")
    assert picture.count("<circle") == len(found) and "a &lt;title&gt;" in picture


def test_undominated() -> None:
    types = [each for each in instances() if each.usd_per_hour is not None and not each.gpus]
    kept = {each.name for each in undominated(types)}
    assert {"c7i.24xlarge", "r7i.24xlarge"} <= kept and len(kept) < len(types)
    assert "c7i.metal-24xl" not in kept or instance("c7i.metal-24xl").clock_mhz > instance("c7i.24xlarge").clock_mhz


def test_the_lines_replace_a_batch_in_tokens() -> None:
    own = ["train.gradient_accumulation_steps=null", "train.global_batch_tokens=8192"]
    config = read_config(CONFIG, own)
    found = offers(config, Workload.assumed(config), OfferRequest(TOKENS, "cost", SPOT, [32], [1], [2], "c7i.24xlarge"))
    pasted = read_config(CONFIG, [*own, *found[0].arguments.split()])
    assert batch_size(pasted.train, 2) == BatchSize(32, found[0].plan.micro_batch)


def test_burstable_types_are_left_out_by_name() -> None:
    arguments = ["instances", "t3.2xlarge,m7i-flex.8xlarge,c7i.48xlarge", "--fits", str(CONFIG)]
    of_four = "USD/h is of one node, tokens/s and USD/1B tokens are of 4 nodes (--nodes)"
    of_one = "USD/h, tokens/s and USD/1B tokens are of one node (--nodes)"
    for more, told in (([], of_four), (["--nodes", "1"], of_one)):
        lines = CliRunner().invoke(app, [*arguments, *more]).stdout.splitlines()
        assert [line.split()[0] for line in lines if "large" in line] == ["c7i.48xlarge"], lines
        assert any(line.startswith("left out: 2 types, which share their CPUs (t3, -flex)") for line in lines)
        assert told in lines
    none = CliRunner().invoke(app, ["instances", "t3.2xlarge", "--fits", str(CONFIG)])
    assert none.exit_code == 2 and "share their CPUs" in none.stderr


def test_amounts_say_something_however_small() -> None:
    amounts = {7728.4: "7,728", 999.994: "999.99", 18.316: "18.32", 0.4: "0.40", 0.0342: "0.034", 0.0: "0.00"}
    assert [dollars(amount) for amount in amounts] == list(amounts.values())
    assert [short(gbit) for gbit in (0.064, 12.5, 3200)] == ["0.064", "12.5", "3,200"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--instance", "c7i.24xlrge"], "is not in the catalogue"),
        (["--instance", "p5.48xlarge", "launch.device=cpu"], "p5.48xlarge has GPUs, but launch.device is cpu"),
        (["--instance", "c7i.24xlarge", "launch.device=cuda"], "has no GPUs, but launch.device is cuda"),
        (["--instance", "hpc7a.96xlarge"], "hpc7a.96xlarge has no price in"),
        (["--instance", "c7i.large", "--nodes", "1"], "nothing in the catalogue fits"),
        (["--tokens", "many"], "--tokens many"),
        (["--tokens", "0"], "--tokens 0"),
        (["--global-batch", "8-4"], "--global-batch 8-4"),
        (["--cores", "8"], "--cores"),
    ],
    ids=str,
)
def test_request_without_offer_names_the_reason(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(CONFIG), "launch.device=auto", "--tokens", "1B", *arguments])
    *progress, error = result.stderr.splitlines()  # a search that takes longer than a second says where it is
    assert (result.exit_code, len(progress) < 2) == (2, True) and told in error, result.stderr


def test_the_command(tmp_path: Path) -> None:
    picture = tmp_path / "x.svg"
    arguments = ["--tokens", "100M", "--optimize", "time", "--instance", "c7i.24xlarge", "--global-batch", "16-128"]
    result = CliRunner().invoke(
        app, ["plan", str(CONFIG), *arguments, "--nodes", "2", "--picture", str(picture), "--json"]
    )
    told = json.loads(result.stdout)
    assert told["tokens"] == TOKENS and picture.read_text().startswith("<svg")
    hours = [each["total_s"] for each in told["offers"]]
    assert hours == sorted(hours) and all(math.isfinite(each["usd"]) for each in told["offers"])
    assert {each["nodes"] for each in told["offers"]} == {2}


def test_hpc_types_are_not_on_spot() -> None:
    found = offers(
        SETTINGS, Workload.assumed(SETTINGS), OfferRequest(TOKENS, "cost", SPOT, [32], [4], [4], "hpc7g.16xlarge")
    )
    assert {each.capacity for each in found} == {"on-demand"}


def test_fitting_instances_sort_by_token_cost() -> None:
    names = "c7i.12xlarge,c7i.24xlarge,r7i.48xlarge,m7i.16xlarge"
    told = [
        json.loads(CliRunner().invoke(app, ["instances", names, "--fits", str(CONFIG), "--json", *more]).stdout)
        for more in ([], ["--sort", "price"])
    ]
    costs, hourly = [each["usd_per_billion_tokens"] for each in told[0]], [each["usd_per_hour"] for each in told[1]]
    assert len(costs) == 4 and costs == sorted(costs) and hourly == sorted(hourly)
    assert {each["nodes"] for each in told[0]} == {4}  # cluster.nodes
    assert [each["name"] for each in told[0]] != [each["name"] for each in told[1]]


def test_hours_that_are_saves_are_told() -> None:
    for tokens, many in (("100K", True), ("100M", False)):
        more = ["--tokens", tokens, "--instance", "c7i.24xlarge", "--nodes", "1"]
        told = CliRunner().invoke(app, ["plan", str(CONFIG), *more, "--ranks-per-node", "2"]).stdout
        found = re.search(
            r"^saves take ([\d.,]+) of ([\d.,]+) hours of the first offer: a faster file system", told, re.M
        )
        assert bool(found) == many, told
        if found:
            saves, hours = (float(number.replace(",", "")) for number in found.groups())
            assert 0.1 * hours < saves <= hours


def test_offer_arguments_name_the_instance_type(tmp_path: Path) -> None:
    values = yaml.safe_load(CONFIG.read_text())
    del values["cluster"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    more = ["--tokens", "100M", "--instance", "c7i.24xlarge", "--nodes", "2", "--ranks-per-node", "2"]
    own = ["run.name=mine", "--document-tokens", "300"]
    told = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), *own, *more]).stdout
    line = re.search(r"^command for the first offer: aliquot (.+)$", told, re.M)
    assert line, told
    pasted = CliRunner().invoke(app, [*shlex.split(line[1]), "--json"])
    again = json.loads(pasted.stdout)
    assert (again["instance"], again["nodes"], again["ranks_per_node"]) == ("c7i.24xlarge", 2, 2)
    assert "run.name=mine" in line[1] and "--document-tokens 300" in line[1]


def test_offers_for_a_cluster_are_rendered(found: list[Offer]) -> None:
    words = shlex.split(found[0].command([str(CONFIG), "run.name=a b"], []))
    assert words[:5] == ["aliquot", "cluster", "render", str(CONFIG), "run.name=a b"]
    assert read_config(CONFIG, words[5:]).cluster is not None
