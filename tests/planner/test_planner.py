"""Invariants of whole plans."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from aliquot.config.schema import RunConfig
from aliquot.core.errors import UnsupportedModelError, UserError
from aliquot.data.workload import Workload
from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import OnDisk, Unsharded
from aliquot.engines.host.host_memory import published_bytes
from aliquot.machine.cpu import read_cpu
from aliquot.models.shaped_model import shaped_model
from aliquot.observe.ledger import PHASES
from aliquot.planner import fit_check
from aliquot.planner.advice import with_advice
from aliquot.planner.automatic_settings import (
    plan_with_least_recomputation,
    plan_with_regular_saves,
    with_settings,
)
from aliquot.planner.memory_phases import COMPILER_BYTES
from aliquot.planner.memory_plan import UNCERTAINTY
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import GIB, Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner, plan
from aliquot.planner.preflight import _plan_with_choices
from aliquot.planner.report import COLUMNS, summary
from aliquot.planner.step_time import StepTime
from aliquot.planner.traffic import traffic
from tests.planner.shapes import LLAMA, QWEN3, planned_config, search_on
from tests.tools.console_text import console_text

SERVER = Machine.from_numbers(64, 16, 10)


def planned(model: dict[str, Any] = LLAMA, nodes: int = 1, ranks: int = 2, **sections: dict[str, Any]) -> Plan:
    return plan(planned_config(model, **sections), SERVER, nodes, ranks)


@pytest.mark.parametrize("engine", ["host", "fsdp", "deepspeed"])
def test_phases_are_those_of_the_ledger(engine: str) -> None:
    made = planned(shard={"engine": engine})
    names = [phase.name for phase in made.phases]
    assert names == [name for name in PHASES if name in names]
    assert ("after fp32 master" in names) == (engine == "deepspeed")
    for phase in made.phases:
        private, shared = phase.private_bytes, phase.shared_bytes
        assert min([*private.values(), *shared.values()]) >= 0
        assert phase.per_rank(2) == sum(private.values()) + math.ceil(sum(shared.values()) / 2)
    assert made.peak_bytes_per_rank == max(phase.per_rank(2) for phase in made.phases)
    columns = {name for names in COLUMNS.values() for name in names}
    assert all(set(phase.private_bytes) <= columns for phase in made.phases), "the table leaves something out"


@pytest.mark.parametrize("sections", [{}, {"shard": {"engine": "host", "offload": "disk", "memory": 0.5}}])
def test_plan_survives_json(sections: dict[str, Any]) -> None:
    made = planned(ranks=1, **sections)
    assert bool(made.on_disk) == bool(sections)
    assert Plan.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_dashboards_take_memory_beside_the_ranks() -> None:
    alone, watched = (planned(observe={"report_to": services}) for services in ([], ["tensorboard", "wandb", "mlflow"]))
    assert watched.beside_bytes - alone.beside_bytes == 186 << 20
    assert watched.limit_bytes == alone.limit_bytes - (93 << 20)


def test_evaluation_sets_take_memory() -> None:
    sets = {"eval_sources": [{"name": "a", "path": "a.txt"}]}
    wide = LLAMA | {"vocab_size": 8192}
    assert planned(wide, data=sets).phases[-1] == planned(wide, data={"eval_fraction": 0.1}).phases[-1]


def test_many_sources_cost_no_more_meta_passes_than_one() -> None:
    counts = []
    for sources in (1, 7):
        told = [{"name": f"s{n}", "path": f"{n}.txt"} for n in range(sources)]
        config = planned_config(LLAMA, data={"path": None, "document": None, "sources": told})
        planner = Planner(PlannedModel(config), SERVER)
        planner.plan(config, RankLayout(1, 2, 8, "cpu", 1), Workload.assumed(config))
        counts.append(len(planner.model._costs))
    assert counts[0] == counts[1] > 0


def test_layers_are_compiled_if_this_saves_minutes() -> None:
    amx = Machine.from_numbers(64, 16, None, "amx")
    without_compiler, model = replace(amx, can_compile=False), PlannedModel(planned_config(LLAMA))
    choices = []
    for steps, machine in ((10_000_000, amx), (10, amx), (10_000_000, without_compiler)):
        config = planned_config(LLAMA, train={"max_steps": steps})
        plan = Planner(model, machine).plan(config, RankLayout(1, 2, 8, "cpu"), Workload.assumed(config))
        choices.append(plan.compile)
    assert choices == ["layers", "none", "none"]


SHORT = {"sequence_length": 64}  # of which a larger micro-batch gains much


@pytest.mark.parametrize(
    ("model", "train", "size"),
    [
        ({}, {}, 32),
        ({}, {"global_batch_size": 6}, 3),  # all that a rank has
        ({}, {"global_batch_size": None}, 1),  # a larger micro-batch would enlarge the global batch
        ({}, {"gradient_accumulation_steps": 8}, 4),  # follows from the other two
        ({"attention_dropout": 0.1}, {}, 1),
    ],
)
def test_micro_batch_grows_while_that_pays(model: dict[str, Any], train: dict[str, Any], size: int) -> None:
    train = {"per_device_train_batch_size": "auto", "global_batch_size": 64, **train}
    assert planned(LLAMA | model, train=train, data=SHORT).micro_batch == size


@pytest.mark.long
def test_micro_batch_grows_to_save_messages() -> None:
    """Among 512 ranks, latency decides: each micro-batch of engine fsdp passes all ranks several times."""
    sizes = []
    for nodes in (8, 256):
        train = {"per_device_train_batch_size": "auto", "global_batch_size": 32 * nodes}
        shard = {"engine": "fsdp", "replicate": "none"}
        model = LLAMA | {"num_hidden_layers": 2}
        config = planned_config(model, data={"sequence_length": 512}, train=train, shard=shard)
        sizes.append(plan(config, Machine.from_numbers(64, 16, 100), nodes, 2).micro_batch)
    assert sizes == [8, 16]


def test_micro_batch_surely_fits() -> None:
    train = {"per_device_train_batch_size": 8, "global_batch_size": 64}
    eight = planned(train=train, data=SHORT)
    needed = eight.beside_bytes + 2 * eight.peak_bytes_per_rank / (1 - UNCERTAINTY)
    for memory, size in ((1.001 * needed, 8), (0.999 * needed, 4)):
        config = planned_config(LLAMA, train=train | {"per_device_train_batch_size": "auto"}, data=SHORT)
        assert plan(config, Machine.from_numbers(memory / GIB, 16, 10), 1, 2).micro_batch == size


def test_recomputation_is_the_least_that_fits() -> None:
    """It comes before larger micro-batches. A run that fits in no way is planned with all recomputation."""
    train = {"global_batch_size": 64, "per_device_train_batch_size": "auto"}
    config = planned_config(LLAMA, train=train, data={"sequence_length": 1024}, shard={"engine": "host"})
    planner, layout = Planner(PlannedModel(config), SERVER), RankLayout(1, 2, 8, "cpu")

    def chosen(kind: str, memory_bytes: float, micro: int | str = "auto") -> Plan:
        settings = {"train.gradient_checkpointing": kind, "train.per_device_train_batch_size": micro}
        planner.machine = replace(SERVER, memory_bytes=int(memory_bytes))
        return planner.plan(with_settings(config, settings), layout, Workload.assumed(config))

    found = []
    for kind in ("none", "selective", "full"):
        alone = chosen(kind, SERVER.memory_bytes, micro=1)
        needed = 2 * alone.peak_bytes_per_rank + alone.beside_bytes
        for memory_bytes in (needed, needed - 2):
            made = chosen("auto", memory_bytes)
            found.append((made.gradient_checkpointing, made.micro_batch, made.fits))
    assert found == [
        ("none", 1, True), ("selective", 1, True), ("selective", 1, True), ("full", 1, True), ("full", 1, True),
        ("full", 1, False),
    ]  # fmt: skip


NOTHING = {"fits": False}
FSDP = {"engine": "fsdp"}


@pytest.mark.parametrize(
    ("plans", "kind"),
    [
        ([{}], "none"),  # no other plan is made
        ([NOTHING, {}], "selective"),
        ([NOTHING, NOTHING, {"step_s": 99.0}], "full"),
        ([NOTHING, NOTHING, NOTHING], "full"),
        ([NOTHING, None, {}], "full"),  # the model supports no selective checkpointing
        ([NOTHING, None, None], "none"),
        ([FSDP, {"step_s": 9.0}], "selective"),  # memory for engine host
        ([FSDP, FSDP, {"step_s": 9.0}], "full"),
        ([FSDP, {"step_s": 9.9}, {"step_s": 11.0}], "none"),
        ([FSDP, NOTHING, NOTHING], "none"),
        ([{"on_disk": OnDisk(layers=1)}, {"step_s": 9.0}], "selective"),
    ],
    ids=str,
)
def test_recomputation_saves_time_only_if_memory_is_short(plans: list[dict[str, Any] | None], kind: str) -> None:
    remaining = iter(zip(("none", "selective", "full"), plans, strict=False))
    base = planned(train={"gradient_checkpointing": "none"})

    def plan_of(changed: RunConfig) -> Plan:
        tried, changes = next(remaining)
        assert changed.train.gradient_checkpointing == tried
        if changes is None:
            raise UnsupportedModelError("no activation checkpointing")
        limit = base.limit_bytes_per_node if changes.get("fits", True) else 0
        values = {name: value for name, value in changes.items() if name != "fits"}
        return replace(base, limit_bytes_per_node=limit, gradient_checkpointing=tried, **{"step_s": 10.0, **values})

    made = plan_with_least_recomputation(planned_config(LLAMA), "host", plan_of)
    assert made.gradient_checkpointing == kind and not list(remaining)


def test_recorded_choices_are_kept_while_they_suit() -> None:
    """A resumed run keeps its micro-batch, unless it spreads unevenly over the ranks."""
    train = {"per_device_train_batch_size": "auto", "global_batch_size": 8}
    config = planned_config(LLAMA, train=train, data=SHORT)

    def resumed(ranks: int, memory_gib: float, recorded: int) -> int:
        layout, machine = RankLayout(1, ranks, 1, "cpu"), Machine.from_numbers(memory_gib, 16, None)
        choices = {"train.per_device_train_batch_size": recorded}
        planner, workload = Planner(PlannedModel(config), machine), Workload.assumed(config)
        return _plan_with_choices(planner, config, choices, layout, workload, print).micro_batch

    assert resumed(2, 64, 1) == 1
    assert resumed(2, 64, 2) == 2
    assert resumed(4, 64, 4) == 2  # two of four ranks would have nothing to do


def test_auto_is_what_fits() -> None:
    """Eight nodes: host's copy of the weights and sums for others do not fit, shards of all of it do."""
    large = LLAMA | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    config = planned_config(large, train={"gradient_checkpointing": "none"})
    model, layout = PlannedModel(config), RankLayout(8, 2, 2, "cpu")
    found = {}
    for memory_gib in (1.2, 2, 4, 8):
        machine = Machine.from_numbers(memory_gib, 4, 25)
        made = Planner(model, machine).plan(config, layout, Workload.assumed(config))
        found[memory_gib] = (made.engine, not fit_check.problems(made, machine))
    assert found == {1.2: ("fsdp", False), 2: ("host", False), 4: ("fsdp", True), 8: ("host", True)}
    held = planned_config(config.model.config, shard={"collectives": "shared_memory"})
    machine = Machine.from_numbers(4, 4, 25)
    assert Planner(model, machine).plan(held, layout, Workload.assumed(held)).engine == "host"


@pytest.mark.parametrize("engine", ["host", pytest.param("fsdp", marks=pytest.mark.long)])
def test_memory_falls_with_ranks_and_grows_with_micro_batches(engine: str) -> None:
    def steady(ranks: int, micro: int) -> Plan:
        train = {"per_device_train_batch_size": micro, "global_batch_size": 32}
        return planned(LLAMA | {"vocab_size": 8192}, 1, ranks, shard={"engine": engine}, train=train)

    def states(made: Plan) -> int:
        last = made.phases[-1].private_bytes
        return last["weights"] + last["moments"]

    by_ranks = [states(steady(ranks, 2)) for ranks in (1, 2, 4)]
    assert by_ranks[0] > by_ranks[1] > by_ranks[2]
    by_micro = [steady(2, micro).peak_bytes_per_rank for micro in (1, 2, 4, 8)]
    assert by_micro == sorted(set(by_micro))


def test_frugal_states_and_precision() -> None:
    def moments(states: str) -> int:
        made = planned(shard={"engine": "host"}, train={"optimizer_states": states})
        return made.phases[-1].private_bytes["moments"]

    exact, half, quarter = (moments(states) for states in ("fp32", "bf16", "int8"))
    assert half == pytest.approx(exact / 2, rel=0.01) and quarter == pytest.approx(exact / 4, rel=0.06)


def test_wire_of_the_host_engine_is_once_per_step() -> None:
    config = planned_config(LLAMA)
    shape = shaped_model(config).shape
    for micro_batches in (1, 8):
        sent = traffic(config, "host", shape, RankLayout(3, 2, 1, "cpu"), micro_batches)
        assert sent.wire_weights_bytes == pytest.approx(
            2 * shape.numel * 2.9 / 8, rel=0.1
        )  # 2.9 bits at a rate of 5e-5
        # All gradients but of the input embedding, of which rows go that were looked up.
        dense = shape.numel - 2048 * 128
        assert 2 * 4 * dense < sent.wire_bytes - sent.wire_weights_bytes <= 2 * 4 * shape.numel
        assert sent.local_bytes == 0
    assert traffic(config, "host", shape, RankLayout(1, 4, 1, "cpu"), 8).wire_bytes == 0


def test_sending_between_hosts_takes_core_time() -> None:
    machine = replace(SERVER, network_bytes_per_s=1e15)

    def saved_s(ranks: int) -> float:
        """By sums of half the size."""
        fp32, bf16 = (
            plan(planned_config(LLAMA, shard={"reduce_dtype": dtype}), machine, 2, ranks) for dtype in ("fp32", "bf16")
        )
        return fp32.step_s - bf16.step_s

    learned = shaped_model(planned_config(LLAMA)).shape.learned_numel
    assert saved_s(1) > (learned - 2048 * 128) * 2 / 2 / 1e9  # each host sends half of all, no core a gigabyte a second
    assert 0 < saved_s(4) < saved_s(1) / 2


def test_unchanged_embedding_rows_are_not_sent() -> None:
    """Two bits a weight of a block with one that moves, what follows in bytes only of those that do."""
    model = {**LLAMA, "vocab_size": 200_000}
    nodes, vocabulary, width = RankLayout(2, 1, 1, "cpu"), 200_000, 128

    def told(tokens: int, decay: float) -> float:
        train = {"precision": "bf16", "learning_rate": 2e-5, "weight_decay": decay, "per_device_train_batch_size": 1}
        config = planned_config(model, data={"sequence_length": tokens}, train={"global_batch_size": 2, **train})
        shape = shaped_model(config).shape
        sent = traffic(config, "host", shape, nodes, 1).wire_weights_bytes
        return sent - (shape.learned_numel - vocabulary * width) * published_bytes(config)

    assert told(4, 0.0) < 0.5 * vocabulary * width / 4
    assert told(4, 0.1) == pytest.approx(vocabulary * width / 4, rel=0.01)
    assert vocabulary * width / 4 < told(4096, 0.0) < vocabulary * width * 0.3


def test_fsdp_wire_grows_with_micro_batches_and_hosts() -> None:
    config = planned_config(LLAMA)
    shape = shaped_model(config).shape
    one, four = (traffic(config, "fsdp", shape, RankLayout(2, 2, 1, "cpu"), count) for count in (1, 4))
    assert four.wire_bytes == 4 * one.wire_bytes
    assert four.wire_bytes == four.local_bytes  # of the four edges of the ring two lead to the other host
    assert traffic(config, "fsdp", shape, RankLayout(1, 2, 1, "cpu"), 4).wire_bytes == 0


def test_fsdp_on_cpu_pays_for_copies_and_weight_groups() -> None:
    """However few tokens there are. The host engine has neither buffers nor groups."""
    more = {}
    for engine in ("host", "fsdp"):
        one, two = (
            planned(shard={"engine": engine}, data={"sequence_length": 16}, train={"global_batch_size": 4 * count})
            for count in (1, 2)
        )
        more[engine] = two.step_s - one.step_s
    assert more["fsdp"] - more["host"] > 2.5e-3 * LLAMA["num_hidden_layers"]


def test_gpus_communicate_through_nvlink_while_computing() -> None:
    """Eight H100 on a host: priced as sockets, or without overlap, a person would buy CPUs instead."""
    train = {"per_device_train_batch_size": 4, "global_batch_size": 32}
    model = LLAMA | {"hidden_size": 1024, "intermediate_size": 4096}
    config = planned_config(model, train=train, launch={"device": "cuda"})
    nvlink, pcie = (plan(config, Machine.from_instance(name), 1, 8) for name in ("p5.48xlarge", "g6e.48xlarge"))
    assert "NVLink at 338 GB/s" in nvlink.rates and "PCIe at 20 GB/s" in pcie.rates
    assert pcie.bottleneck.startswith("network-bound") and pcie.step_s > 2 * nvlink.step_s


def test_traffic_does_not_depend_on_batch_notation() -> None:
    """Accumulation and the global batch fix the micro-batch."""
    given = planned_config(LLAMA, train={"global_batch_size": 32, "per_device_train_batch_size": 4})
    sizes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}  # what nobody gives is 1
    derived = given.model_copy(update={"train": given.train.model_copy(update=sizes)})
    one, other = (plan(config, SERVER, 2, 2) for config in (given, derived))
    assert one == other


def advised(machine: Machine, config: RunConfig, nodes: int, ranks: int = 2) -> Plan:
    search = search_on(machine, config, machine.layout(config, nodes, ranks))
    return with_advice(search.planner.plan(config, search.layout, search.workload), search, config)


def test_network_bound_run_gets_advice() -> None:
    slow, config = Machine.from_numbers(64, 16, 0.1), planned_config(LLAMA, train={"global_batch_size": 4})
    made = advised(slow, config, 2)
    found = re.fullmatch(
        r"network-bound \([\d.]+x the time of matrix products\): a global batch of (\d+) sequences"
        r" would be ([\d.]+)x as fast",
        made.bottleneck,
    )
    assert found, made.bottleneck
    larger = planned_config(LLAMA, train={"global_batch_size": int(found[1])})
    gained = plan(larger, slow, 2, 2).tokens_per_s / made.tokens_per_s
    assert gained == pytest.approx(float(found[2]), rel=0.06)


def test_slower_precision_gets_advice() -> None:
    """Zen 3 multiplies 0.7 numbers in bf16 a cycle, 30 in fp32."""
    found = {}
    for name in ("c6a.2xlarge", "c7a.2xlarge", "c7i.2xlarge"):
        for given, other in (("bf16", "fp32"), ("fp32", "bf16")):
            machine, config = Machine.from_instance(name), planned_config(LLAMA, train={"precision": given})
            made = advised(machine, config, 1)
            found[name, given] = f"train.precision={other} would be" in made.bottleneck
    assert [case for case, told in found.items() if told] == [
        ("c6a.2xlarge", "bf16"), ("c7a.2xlarge", "fp32"), ("c7i.2xlarge", "fp32"),
    ]  # fmt: skip


def test_faster_precision_is_advised_with_what_makes_it_fit() -> None:
    zen3, config = Machine.from_numbers(64, 16, None, "avx2"), planned_config(LLAMA, shard={"engine": "host"})
    config = with_settings(config, {"train.gradient_checkpointing": "full"})
    plans = [plan(with_settings(config, {"train.precision": kind}), zen3, 1, 4) for kind in ("bf16", "fp32")]
    sizes = [made.peak_bytes_per_rank * made.ranks_per_node + made.beside_bytes for made in plans]
    made = advised(replace(zen3, memory_bytes=sum(sizes) // 2), config, 1, ranks=4)
    assert made.fits and "train.precision=fp32 launch.ranks=" in made.bottleneck


def test_hidden_communication_is_no_bottleneck() -> None:
    hidden = StepTime(True, matmul_s=0.9, memory_s=0.9, local_s=0.0, wire_s=1.0, disk_s=0.0)
    assert hidden.bottleneck == "compute-bound" and hidden.total_s == 1.8
    assert replace(hidden, wire_s=2.0).bottleneck == "network-bound (2.2x the time of matrix products)"
    assert replace(hidden, overlaps=False).bottleneck == "network-bound (1.1x the time of matrix products)"


def test_smaller_micro_batches_take_less_time() -> None:
    train = {"global_batch_size": 8, "per_device_train_batch_size": 8}
    sources = [{"name": name, "path": f"{name}.txt"} for name in "abc"]
    one = plan(planned_config(LLAMA, train=train), SERVER, 1, 1)
    three = plan(planned_config(LLAMA, train=train, data={"path": None, "sources": sources}), SERVER, 1, 1)
    assert one.step_s < three.step_s < 1.3 * one.step_s


def test_run_without_held_out_data_plans_no_evaluation() -> None:
    made = plan(planned_config(LLAMA, train={"max_steps": 4, "eval_steps": 2}), SERVER, 1, 1)
    assert made.evaluations == made.uncounted_evaluations == 0


def test_total_time_has_evaluations_saves_and_export() -> None:
    sections: dict[str, Any] = {"train": {"max_steps": 25, "eval_steps": 10}, "data": {"eval_fraction": 0.1}}
    config = planned_config(LLAMA, checkpoint={"every": 5, "async": False}, **sections)
    workload = replace(Workload.assumed(config), eval_sequences=64)
    made = plan(config, SERVER, 1, 2, workload)
    assert (made.evaluations, made.saves) == (3, 5)
    assert made.evaluation_s > 0 and made.save_s > made.export_s > 0
    beside_s = 3 * made.evaluation_s + 5 * made.save_s + made.export_s
    assert made.total_s == pytest.approx(25 * made.step_s + beside_s)
    unknown = plan(config, SERVER, 1, 2)  # nothing is known of the held-out data
    assert (unknown.evaluations, unknown.uncounted_evaluations) == (0, 3)


def test_preferences_take_the_memory_of_sft_and_time_for_their_reference() -> None:
    sft, simpo = (planned_config(LLAMA, train={"max_steps": 4, "objective": name}) for name in ("sft", "simpo"))
    dpo = simpo.model_copy(update={"train": simpo.train.model_copy(update={"objective": "dpo"})})
    workload = replace(Workload.assumed(sft), sequences=64)
    plain, twice, compared = (plan(config, SERVER, 1, 2, workload) for config in (sft, simpo, dpo))
    assert plain.step_s < twice.step_s < 1.3 * plain.step_s  # the head runs twice
    assert twice.peak_bytes_per_rank == pytest.approx(plain.peak_bytes_per_rank, rel=0.01)
    assert plain.reference_s == twice.reference_s == 0 < compared.reference_s
    assert compared.total_s == pytest.approx(twice.total_s + compared.reference_s)
    kto = simpo.model_copy(update={"train": simpo.train.model_copy(update={"objective": "kto"})})
    mismatched = plan(kto, SERVER, 1, 2, workload)  # also of answers to other prompts, in each step
    assert mismatched.reference_s == pytest.approx(2 * compared.reference_s)
    assert 1.1 * twice.step_s < mismatched.step_s < 1.5 * twice.step_s


@pytest.mark.parametrize(
    ("step_s", "gigabytes", "checkpoint", "fits", "steps"),
    [
        (6.0, 1, {}, True, 300), (0.7, 1, {}, True, 2600), (4000.0, 1, {}, True, 1),
        (6.0, 100, {"async": False}, True, 670),  # 100 GB take 200 s
        (6.0, 100, {"buffer_bytes": 50 * GIB}, True, 300), (6.0, 1500, {"buffer_bytes": 900 * GIB}, True, 500),
        (6.0, 1, {}, False, 0),
    ],
)  # fmt: skip
def test_automatic_saves(step_s: float, gigabytes: int, checkpoint: dict[str, Any], fits: bool, steps: int) -> None:
    """Every half an hour; more seldom where training waits for saves, or where they follow each other."""
    base = replace(planned(), step_s=step_s, checkpoint_bytes=gigabytes * 10**9, save_s=2.0 * gigabytes)

    def plan_of(config: RunConfig) -> Plan:
        limit = base.limit_bytes_per_node if fits or not config.checkpoint.every else 0
        return replace(base, save_steps=config.checkpoint.save_steps, limit_bytes_per_node=limit)

    assert plan_with_regular_saves(planned_config(LLAMA, checkpoint=checkpoint), plan_of).save_steps == steps


def test_evaluation_takes_gathering_time() -> None:
    """Weights that are on each host anyway take nothing."""
    took = {}
    for engine in ("host", "fsdp", "deepspeed"):
        sections: dict[str, Any] = {"train": {"max_steps": 4, "eval_steps": 2}, "data": {"eval_fraction": 0.1}}
        config = planned_config(LLAMA, shard={"engine": engine}, **sections)
        workload = replace(Workload.assumed(config), eval_sequences=64)
        took[engine] = plan(config, SERVER, 1, 2, workload).evaluation_s
    assert took["host"] < min(took["fsdp"], took["deepspeed"])


def test_heap_holes_and_compiler_add_memory() -> None:
    def steady(engine: str, **train: Any) -> dict[str, int]:
        made = plan(planned_config(LLAMA, shard={"engine": engine}, train=train), SERVER, 1, 2)
        return made.phases[-1].private_bytes

    shape = PlannedModel(planned_config(LLAMA)).shape
    root = shape.padded_groups(2, learned=True)[0]
    held = {engine: steady(engine)["allocator"] for engine in ("fsdp", "deepspeed")}
    assert held["fsdp"] >= 4 * root // 2 and held["deepspeed"] >= 2 * 2 * shape.numel
    assert steady("host", compile="layers")["process"] - steady("host")["process"] == COMPILER_BYTES


def test_evaluation_gathers_frozen_weights() -> None:
    """Frozen ones, too; and where weights stay gathered, once."""
    layout = RankLayout(2, 2, 8, "cpu")
    full = planned_config(LLAMA, shard={"engine": "fsdp"})
    frozen = planned_config(LLAMA, shard={"engine": "fsdp"}, train={"freeze": ["model.layers.*"]})
    one, other = (traffic(each, "fsdp", PlannedModel(each).shape, layout, 1) for each in (full, frozen))
    assert other.wire_bytes < one.wire_bytes and 0 < one.forward[0] == other.forward[0] < one.wire_bytes / 2
    kept = traffic(full, "fsdp", PlannedModel(full).shape, layout, 4, Unsharded(weights=True))
    assert kept.forward_once and not one.forward_once and kept.forward == one.forward


@pytest.mark.parametrize(("dtype", "precision", "itemsize"), [
    ("auto", "bf16", 2), ("auto", "fp32", 4), ("float32", "bf16", 4), ("bfloat16", "fp32", 2),
])  # fmt: skip
def test_export_size_follows_dtype(dtype: str, precision: str, itemsize: int) -> None:
    config = planned_config(LLAMA, train={"precision": precision})
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    made = plan(config, SERVER, 1, 2)
    assert made.export_bytes == made.parameters * itemsize


def test_unpacked_rows_have_document_lengths() -> None:
    config = planned_config(LLAMA, data={"packing": False})
    shorter = planned_config(LLAMA, data={"packing": False, "sequence_length": 128})
    assert Workload.assumed(config, 128).samples == Workload.assumed(shorter).samples == ((0, 128),)
    assert Workload.assumed(planned_config(LLAMA), 100).samples[0][-1] == config.data.sequence_length
    made = plan(config, SERVER, 1, 2)
    assert made.kernel_shapes is None and plan(planned_config(LLAMA), SERVER, 1, 2).kernel_shapes is not None


def test_amx_kernels_of_unpacked_rows_are_few_and_large() -> None:
    amx, unpacked = replace(SERVER, isa=(*SERVER.isa, "amx_bf16")), planned_config(LLAMA, data={"packing": False})
    made, packed = (plan(config, amx, 1, 2) for config in (unpacked, planned_config(LLAMA)))
    assert made.kernel_shapes is not None and packed.kernel_shapes is not None
    assert made.kernel_shapes > packed.kernel_shapes
    process = [each.phases[-1].private_bytes["process"] for each in (packed, plan(unpacked, SERVER, 1, 2), made)]
    assert process[0] < process[1] < process[2] < process[0] + 1024 * (1 << 20)


@pytest.mark.long
def test_slow_networks_favour_engine_host() -> None:
    slow = Machine.from_numbers(64, 16, 0.1)
    config = planned_config(LLAMA, train={"global_batch_size": 64, "per_device_train_batch_size": 1})
    found = search_on(slow, config, RankLayout(2, 2, 8, "cpu")).fastest()
    assert all(each.plan.engine == "host" for each in found)
    fsdp = plan(planned_config(LLAMA, shard={"engine": "fsdp"}), slow, 2, 2)
    assert fsdp.bottleneck.startswith("network-bound")


def test_plan_of_another_machine_ignores_this_one() -> None:
    config = planned_config(QWEN3)
    first, again = (plan(config, Machine.from_instance("c7i.8xlarge"), 2, 4) for _ in range(2))
    assert first == again
    assert first.limit_bytes_per_node == 57_691 << 20  # Karpenter's allocatable memory, not the type's 64 GiB
    assert first.usd_per_hour == 2 * Machine.from_instance("c7i.8xlarge").instance.usd_per_hour  # type: ignore[union-attr]
    assert "estimate" in first.rates


def test_remedies_fit() -> None:
    tight = Machine.from_numbers(1.2, 4, 10)
    config = planned_config(
        LLAMA | {"vocab_size": 16384, "num_hidden_layers": 1}, train={"per_device_train_batch_size": 16}
    )
    search = search_on(tight, config, RankLayout(1, 2, 2, "cpu"))
    assert not search.planner.plan(config, search.layout, search.workload).fits
    advice = search.remedies()
    assert "train.per_device_train_batch_size=" in advice and "% time" in advice
    assert all(candidate.plan.fits for candidate in search.fastest())


def test_short_shm_replaces_the_verdict() -> None:
    made = replace(planned(), shm_bytes_per_node=1 << 30)
    assert made.fits
    for shm_bytes, words in (
        (1 << 26, "does not fit: /dev/shm has 0.06 GiB, but the run needs 1.00 GiB"),
        (1 << 30, "fits: "),
    ):
        problems = fit_check.problems(made, replace(SERVER, shm_bytes=shm_bytes))
        assert console_text(summary(made, problems, "here", "assumed")).splitlines()[1].startswith(words)


def test_settings_without_engine_are_refused() -> None:
    with pytest.raises(UserError, match="no GPU"):
        planned(launch={"device": "cuda"})


def test_the_seeds_table_of_llama_3_8b() -> None:
    """GiB that DeepSpeed printed on 4 ranks with both offloads: 4.81, 5.44, 12.92, 20.4, 24.47."""
    model = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    defaults = {"grad_accum_dtype": "bf16"}  # of DeepSpeed; aliquot's is fp32
    settings = {"bf16": {"enabled": True}, "zero_optimization": zero, "data_types": defaults}
    shard = {"engine": "deepspeed", "deepspeed_config": settings}
    made = planned(model, 1, 4, shard=shard)
    told = {phase.name: sum(phase.private_bytes.values()) for phase in made.phases}
    names = [name for name in told if name.startswith("after")]
    increments = [round((told[b] - told[a]) / 2**30, 2) for a, b in pairwise(names)]
    assert increments == [0.63, 7.48, 7.48, 4.07]


def test_pinned_rank_plans_for_all_cores() -> None:
    allowed = frozenset(os.sched_getaffinity(0))
    whole = Machine.local()
    try:
        os.sched_setaffinity(0, {min(allowed)})
        pinned = Machine.local(read_cpu(allowed=allowed))
        assert (pinned.cores, pinned.cpu) == (whole.cores, whole.cpu)
        assert Machine.local().cores == 1
    finally:
        os.sched_setaffinity(0, allowed)


def lines_of(made: Plan) -> dict[str, str]:
    """By their first words."""
    lines = console_text(summary(made, [], "here", "assumed"), width=300).splitlines()
    return {line[:16].strip(): line[16:] for line in lines}


def test_singular_words_for_one() -> None:
    made = replace(planned(), evaluations=1, uncounted_evaluations=1, saves=1, saves_beside=1, stall_s=1.0)
    beside = lines_of(made)["beside steps"]
    assert beside.startswith("1 evaluation of ") and ", 1 evaluation that is not counted, 1 save beside them" in beside
    beside = lines_of(replace(made, evaluations=2791, uncounted_evaluations=2, saves_beside=1000))["beside steps"]
    assert beside.startswith("2,791 evaluations of ") and "1,000 saves beside them" in beside
    assert ", 2 evaluations that are not counted, " in beside
    sizes = {1_090_000: "1.09 M", 999_600_000: "1 B", 8_030_261_248: "8.03 B", 9_999: "9,999"}
    assert [replace(made, parameters=number).size for number in sizes] == [
        f"{size} parameters" for size in sizes.values()
    ]


@pytest.mark.parametrize(
    ("train", "checkpoint", "words"),
    [
        ({"max_steps": 100}, {"every": 20, "keep": 2}, " every 20 steps, at most 3 at once: 300 MB"),
        ({"max_steps": 100}, {"every": 0}, ""),
        ({"max_steps": 100}, {"every": "auto"}, ""),  # the run ends before the first is due
        ({"eval_steps": 1}, {"every": 1, "keep": 1, "best": True}, " every step, at most 3 at once: 300 MB"),
        ({"max_steps": None}, {"every": "auto", "keep": 4}, " every 7 steps, at most 5 at once: 500 MB"),
    ],
)  # fmt: skip
def test_disk_that_checkpoints_take(train: dict[str, object], checkpoint: dict[str, object], words: str) -> None:
    data = {"eval_fraction": 0.1} if "best" in checkpoint else {}
    made = plan(planned_config(LLAMA, train=train, checkpoint=checkpoint, data=data), SERVER)
    chosen = made.save_steps if made.steps else 7
    assert lines_of(replace(made, checkpoint_bytes=10**8, save_steps=chosen))["disk"].endswith(
        f", 100 MB a checkpoint{words}"
    )


def test_saves_longer_than_all_steps_get_advice() -> None:
    made = replace(planned(), steps=10, step_s=10.0, saves=1, saves_beside=9, save_s=10.0, stall_s=80.0)
    assert made.concerns == []
    (concern,) = replace(made, stall_s=100.0).concerns
    assert concern.startswith("saves take 1 min 50 s, longer than all steps: save less often (checkpoint.every), or on")
