"""Plans for GPUs, made without a GPU: memory of the GPU and of the host, against separate limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aliquot.catalogue.instances import instances
from aliquot.config.read_config import read_config
from aliquot.config.schema import RunConfig
from aliquot.core.errors import EngineError, UserError
from aliquot.data.workload import Workload
from aliquot.distributed.topology import RankLayout
from aliquot.engines.engine_plan import SHARDED, Unsharded
from aliquot.engines.host.host_memory import COPY_SLOTS, RING_BYTES
from aliquot.observe.ledger import PHASES
from aliquot.planner import fit_check, planned_model
from aliquot.planner.advice import _plans, _series
from aliquot.planner.automatic_settings import with_settings
from aliquot.planner.memory_phases import CONTEXT_BYTES, CUDA_HOST_BYTES, NCCL_BYTES
from aliquot.planner.memory_plan import MARGIN
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner, plan
from aliquot.planner.rates import estimated, known_gpu
from aliquot.planner.report import summary
from aliquot.planner.settings_search import Search
from tests.conftest import REPOSITORY
from tests.engines.cases import DEEPSEEK, SMALL
from tests.planner.shapes import LLAMA, planned_config, search_on
from tests.tools import docs_gpus
from tests.tools.console_text import console_text

MACHINE = Machine.from_instance("g6e.12xlarge")  # four GPUs
WIDE = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}


def planned(ranks: int = 1, **sections: dict[str, object]) -> Plan:
    config = planned_config(LLAMA, launch={"device": "cuda", "ranks": ranks}, **sections)
    return plan(config, MACHINE, 1, ranks)


def llama_8b(micro_batches: int) -> RunConfig:
    """Micro-batches of 8,192 tokens."""
    train = {"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": micro_batches}
    example = read_config(REPOSITORY / "examples" / "llama3-8b-gpu.yaml")
    return with_settings(example, {"data.sequence_length": 8192, "shard.offload": "none", **train})


def of(found: Plan, phase: str, host: bool = False) -> dict[str, int]:
    phases = found.host_phases if host else found.phases
    return dict(next(each for each in phases if each.name == phase).private_bytes)


def test_gpu_phases_are_those_of_the_ledger() -> None:
    alone, together = planned(1), planned(4)
    for phases in (alone.phases, alone.host_phases):
        assert [phase.name for phase in phases] == [name for name in PHASES if not name.startswith("after ")]
    assert of(alone, "process start") == {"process": CONTEXT_BYTES}
    assert of(together, "process start") == {"process": CONTEXT_BYTES + NCCL_BYTES}
    weights = 4 * alone.parameters
    assert of(alone, "steady peak")["weights"] == weights and "weights" not in of(alone, "steady peak", host=True)
    assert of(alone, "process start", host=True)["process"] > CUDA_HOST_BYTES
    assert alone.fits and alone.host_peak_bytes_per_rank < alone.host_limit_bytes


def test_latent_attention_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are narrower than its queries and keys."""
    warned: list[object] = []
    monkeypatch.setattr(planned_model._log, "warning", lambda *told: warned.append(told))
    narrower = {**SMALL, **DEEPSEEK, "max_position_embeddings": 256, "v_head_dim": 4}
    config = planned_config(narrower, launch={"device": "cuda", "ranks": 1})
    assert plan(config, MACHINE, 1, 1).fits
    assert warned == []


def test_prices_of_spot_are_of_types_that_are_sold_so() -> None:
    shown = {}
    for name in ("hpc7g.16xlarge", "c7g.16xlarge"):
        made = plan(planned_config(LLAMA), Machine.from_instance(name), 1, 2)
        shown[name] = console_text(summary(made, [], name, ""))
    assert " on spot" in shown["c7g.16xlarge"] and "USD on demand" in shown["hpc7g.16xlarge"]
    assert " on spot" not in shown["hpc7g.16xlarge"]


def test_offload_moves_states_to_host_memory() -> None:
    train = {"global_batch_size": 2}  # of one micro-batch
    resident, offloaded = planned(2, train=train), planned(2, train=train, shard={"offload": "cpu"})
    for name, pinned in (("weights", True), ("gradients", True), ("moments", False)):
        in_host, on_gpu = of(offloaded, "steady peak", host=True)[name], of(resident, "steady peak")[name]
        # torch rounds sizes of pinned memory up to powers of two.
        assert on_gpu < in_host < 2 * on_gpu if pinned else on_gpu == in_host > 0
        assert of(offloaded, "steady peak")[name] == 0
    short = replace(offloaded, host_limit_bytes_per_node=offloaded.host_peak_bytes_per_rank * 9 // 10)
    assert not short.fits and fit_check.cannot_fit(short)
    (told,) = fit_check.problems(short, MACHINE)
    assert "of host memory, but its limit is" in told and "\n" not in told


def test_unsharded_gradients_stay_on_the_gpu() -> None:
    """FSDP2 adds micro-batches up where they are computed; a rank's own part alone goes to the machine."""
    train = {"global_batch_size": 64, "per_device_train_batch_size": 2}
    resident, offloaded = planned(4, train=train), planned(4, train=train, shard={"offload": "cpu"})
    assert resident.unsharded.gradients and offloaded.unsharded.gradients
    sums = of(resident, "steady peak")["gradients"]
    assert of(offloaded, "steady peak")["gradients"] == sums
    own = of(offloaded, "steady peak", host=True)["gradients"]
    assert 0 < own < 2 * sums / (offloaded.nodes * offloaded.ranks_per_node)


def test_offload_costs_time() -> None:
    """Weights twice and gradients once over PCIe with each micro-batch, if the GPU cannot keep them within the step."""
    train = {"global_batch_size": 16, "per_device_train_batch_size": 2}
    resident, offloaded = planned(train=train), planned(train=train, shard={"offload": "cpu"})
    kept = offloaded.unsharded
    copies_s = (1 if kept.weights else 16) / 20e9 + (1 / 20e9 if kept.gradients else 8 / 8e9)
    assert offloaded.step_s - resident.step_s > 4 * resident.parameters * copies_s


def test_offloaded_runs_are_told_of_engine_host() -> None:
    """Both keep states in the memory of the host."""
    machine, layout = Machine.from_instance("g6e.8xlarge"), RankLayout(4, 1, 8, "cuda")
    config = planned_config(WIDE, launch={"device": "cuda", "ranks": 1}, shard={"offload": "cpu", "engine": "fsdp"})
    config = with_settings(config, {"train.gradient_accumulation_steps": 16})
    planner, workload = Planner(PlannedModel(config), machine), Workload.assumed(config)
    made, search = planner.plan(config, layout, workload), Search(planner, config, layout, workload)
    others = {words: other for series in _series(made, search, config) for words, other in _plans(series, search)}
    assert others["shard.engine=host shard.offload=none"].engine == "host"


def test_every_gpu_of_the_catalogue_has_its_data_sheet() -> None:
    names = {each.gpu_name for each in instances() if each.gpus and not each.has_old_gpu}
    assert {name: known_gpu(name) for name in names if known_gpu(name) is None} == {}
    assert known_gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition") == "rtxpro6000"
    assert known_gpu("NVIDIA H100 80GB HBM3") == "h100" and known_gpu("NVIDIA GeForce RTX 4090") == "rtx4090"
    assert known_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


def test_unknown_gpu_is_named() -> None:
    layout = RankLayout(1, 1, 1, "cuda")
    found = estimated(replace(MACHINE, gpu_name="NVIDIA GeForce RTX 2080"), layout)
    assert "RTX 2080's is not known" in found.source and found.off_by == 10


def test_gpus_before_ampere_are_refused() -> None:
    for name in ("g4dn.xlarge", "g5g.xlarge", "p3dn.24xlarge"):
        with pytest.raises(UserError, match=rf"of {name} is too old: aliquot needs compute capability 8\.0"):
            plan(planned_config(LLAMA, launch={"device": "auto"}), Machine.from_instance(name))
    assert plan(planned_config(LLAMA), Machine.from_instance("g4dn.xlarge")).device == "cpu"


def test_slower_hopper_cards_have_lower_estimates() -> None:
    for name, said in (("H100", True), ("NVIDIA H200", True), ("NVIDIA H100 PCIe", False), ("NVIDIA H100 NVL", False)):
        found = estimated(replace(MACHINE, gpu_name=name), RankLayout(1, 1, 1, "cuda"))
        assert (found.products[2][0][1] > 0.7 * 989e12) == said == ("as one H200 reached" in found.source), name


def test_sharded_hopper_is_as_fast_as_published_runs() -> None:
    """torchtitan reports 5,600 to 6,700 tokens/s a GPU for 8 B on 8 to 128 H100, sequences of 8,192."""
    for nodes in (1, 16):
        made = plan(llama_8b(1), Machine.from_instance("p5.48xlarge"), nodes, 8)
        assert 5_000 < made.tokens_per_s / (8 * nodes) < 6_800 and "5,600 to 6,700 tokens/s" in made.rates


def test_fp8_needs_gpus_that_multiply_in_it() -> None:
    config = planned_config(WIDE, launch={"device": "cuda", "ranks": 1}, train={"fp8": True})
    assert plan(config, Machine.from_instance("p5.48xlarge"), 1, 1).fp8
    with pytest.raises(EngineError, match=r"p4d\.24xlarge has A100"):
        plan(config, Machine.from_instance("p4d.24xlarge"), 1, 1)
    with pytest.raises(EngineError, match="fp8 is for one GPU"):
        plan(config, Machine.from_instance("p5.48xlarge"), 1, 8)


def test_the_plan_shows_both() -> None:
    text = " ".join(console_text(summary(planned(), [], "some", "assumed"), width=120).split())
    assert "of GPU memory of a rank" in text and "of the machine's memory of a rank" in text
    assert "of GPU memory a rank" in text


def test_replicas_are_advised_where_they_fit_and_save_time() -> None:
    """Sixteen micro-batches: gradients cross the network sixteen times, if all ranks divide the weights."""
    model = {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    train = {"per_device_train_batch_size": 1, "global_batch_size": 256}
    machine = replace(MACHINE, network_bytes_per_s=1e9)

    def made(replicate: str, memory_bytes: int = 1 << 36, **sections: dict[str, object]) -> Plan:
        shard = {"engine": "fsdp", "replicate": replicate, **sections.pop("shard", {})}
        config = planned_config(model, launch={"device": "cuda", "ranks": 4}, train=train, shard=shard, **sections)
        return plan(config, replace(machine, gpu_memory_bytes=memory_bytes), 4, 4)

    nodes = made("nodes")
    assert (made("none").replicate, nodes.replicate) == ("none", "nodes")
    less = int(7.5 * (1 << 30))  # too little for that
    sharded, replicated = made("none", less), made("nodes", less)
    assert made("auto", less) == sharded and replicated.fits
    assert replicated.step_s < sharded.step_s and replicated.peak_bytes_per_rank > sharded.peak_bytes_per_rank
    numel = replicated.parameters
    assert replicated.wire_bytes_per_step == 2 * 3 * 4 * numel < sharded.wire_bytes_per_step
    assert of(replicated, "steady peak")["moments"] == 4 * of(sharded, "steady peak")["moments"]
    assert of(replicated, "process start")["process"] == CONTEXT_BYTES + 3 * NCCL_BYTES
    config = planned_config(model, launch={"device": "cuda", "ranks": 4}, train=train, shard={"engine": "fsdp"})
    search = search_on(replace(machine, gpu_memory_bytes=less), config, machine.layout(config, 4, 4))
    others = {words: other for series in _series(sharded, search, config) for words, other in _plans(series, search)}
    assert others["shard.replicate=nodes"].step_s == pytest.approx(replicated.step_s, rel=0.01)
    assert "on 4 nodes, which send gradients alone" in console_text(summary(replicated, [], "some", "assumed"))


def test_more_memory_keeps_more_unsharded() -> None:

    def made(memory_bytes: int, sequences: int = 16) -> Plan:
        train = {"per_device_train_batch_size": 1, "global_batch_size": sequences}
        config = planned_config(WIDE, launch={"device": "cuda", "ranks": 4}, train=train)
        return plan(config, replace(MACHINE, gpu_memory_bytes=memory_bytes), 1, 4)

    ample = found = made(1 << 36)
    assert ample.unsharded == Unsharded(weights=True, gradients=True)
    assert made(1 << 36, sequences=4).unsharded == Unsharded(weights=True)  # reduced once anyway
    for expected in (Unsharded(weights=True), SHARDED):
        less = made(int((found.peak_bytes_per_rank - 1) / (1 - MARGIN)))  # with room for what plans are off by
        assert less.unsharded == expected and less.fits
        assert less.peak_bytes_per_rank < found.peak_bytes_per_rank
        assert less.local_bytes_per_step > found.local_bytes_per_step
        found = less
    assert plan(planned_config(LLAMA, shard={"engine": "fsdp"}), MACHINE, 1, 2).unsharded == SHARDED  # on CPUs


def test_engine_host_has_states_in_host_memory_and_weights_on_the_gpu() -> None:
    made = planned(2, shard={"engine": "host"})
    on_gpu, on_host = of(made, "steady peak"), of(made, "steady peak", host=True)
    assert on_gpu["weights"] == 2 * made.parameters and on_gpu["moments"] == 0
    assert on_host["moments"] == pytest.approx(8 * made.parameters / 2, rel=0.01)
    shared = made.host_phases[-1].shared_bytes
    assert shared["weights"] == 2 * made.parameters and shared["buffers"] > 2 * RING_BYTES
    assert of(made, "process start") == {"process": CONTEXT_BYTES} and made.shm_bytes_per_node == 0  # no NCCL
    frugal = planned(2, shard={"engine": "host"}, train={"optimizer_states": "int8"})
    assert of(frugal, "steady peak", host=True)["moments"] < 0.3 * on_host["moments"]


def test_layers_are_copied_for_each_use_if_the_gpu_is_too_small() -> None:
    """As many layers as needed, and each costs time."""
    config = planned_config(
        WIDE, launch={"device": "cuda", "ranks": 1}, shard={"engine": "host"}, train={"global_batch_size": 64}
    )
    resident = plan(config, MACHINE, 1, 1)
    sizes = [int(share * resident.peak_bytes_per_rank / (1 - MARGIN)) for share in (0.98, 0.95, 0.9)]
    plans = [resident, *(plan(config, replace(MACHINE, gpu_memory_bytes=size), 1, 1) for size in sizes)]
    assert all(made.peak_bytes_per_rank <= (1 - MARGIN) * made.limit_bytes for made in plans)
    counts = [made.copied_layers for made in plans]
    assert counts[0] == 0 and COPY_SLOTS < counts[1] < counts[2] < counts[3] <= WIDE["num_hidden_layers"]
    assert resident.copied_words is None and "not yet measured" in (plans[1].copied_words or "")
    assert [made.step_s for made in plans] == sorted(made.step_s for made in plans)


def test_a_model_that_is_too_large_for_its_gpu_is_pointed_to_engine_host() -> None:
    config = planned_config(WIDE, launch={"device": "cuda", "ranks": 1}, shard={"engine": "fsdp"})
    machine = docs_gpus.consumer(2, 64)
    search = search_on(machine, config, machine.layout(config))
    assert "a rank needs" in fit_check.problems(search.planner.plan(config, search.layout, search.workload), machine)[0]
    assert "; shard.engine=host (" in search.remedies()


def test_states_go_to_disk_if_host_memory_is_short() -> None:
    config = planned_config(WIDE, launch={"device": "cuda", "ranks": 1}, shard={"offload": "disk", "engine": "host"})
    ample = plan(config, MACHINE, 1, 1)
    assert not ample.on_disk
    short = plan(config, replace(MACHINE, memory_bytes=int(0.9 * ample.host_peak_bytes_per_rank)), 1, 1)
    assert short.on_disk.states and not short.on_disk.layers and short.fits
    assert short.peak_bytes_per_rank == ample.peak_bytes_per_rank  # of the GPU


def test_engine_host_communicates_once_a_step() -> None:
    """GPUs that cannot keep gradients whole reduce them with every micro-batch, unless the engine is host."""
    train = {"global_batch_size": 64, "per_device_train_batch_size": 1, "gradient_checkpointing": "none"}
    config = planned_config(
        WIDE, launch={"device": "cuda", "ranks": 1, "threads_per_rank": 24}, train=train, data={"sequence_length": 2048}
    )
    slow = replace(MACHINE, gpu_memory_bytes=4 << 30, network_bytes_per_s=1e9)
    host, chosen = with_settings(config, {"shard.engine": "host"}), plan(config, slow, 4, 1)
    once = plan(host, slow, 4, 1)
    assert once.fits and once.step_s < chosen.step_s and chosen.engine == "fsdp", "no GPU has shown it"
    more = with_settings(host, {"train.global_batch_size": 128})
    assert plan(more, slow, 4, 1).wire_bytes_per_step == pytest.approx(once.wire_bytes_per_step, rel=0.05)


def test_engine_host_is_among_the_remedies_of_a_small_gpu() -> None:
    config = planned_config(WIDE, launch={"device": "cuda", "ranks": 1})
    resident, once = (plan(with_settings(config, {"shard.engine": e}), MACHINE, 1, 1) for e in ("fsdp", "host"))
    small = replace(MACHINE, gpu_memory_bytes=(resident.peak_bytes_per_rank + once.peak_bytes_per_rank) // 2)
    assert plan(config, small, 1, 1).engine == "fsdp"
    search = Search(Planner(PlannedModel(config), small), config, small.layout(config, 1, 1), Workload.assumed(config))
    assert "shard.engine=host (" in search.remedies()


@pytest.mark.long
def test_llama_3_8b_is_four_times_as_fast_as_with_full_sharding() -> None:
    """Sixteen micro-batches of 8,192 tokens on four nodes of one L40S and 25 Gbit/s."""
    machine = Machine.from_instance("g6e.8xlarge")
    sharded, chosen = (plan(with_settings(llama_8b(16), {"shard.engine": e}), machine, 4, 1) for e in ("fsdp", "host"))
    assert chosen.engine == "host" and chosen.fits and sharded.fits
    assert chosen.tokens_per_s >= 4 * sharded.tokens_per_s
