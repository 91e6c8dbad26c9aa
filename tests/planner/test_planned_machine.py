"""Devices, ranks and instruction sets of planned machines."""

from __future__ import annotations

import typing

import pytest

from aliquot.cli import plan_command
from aliquot.core.errors import DeviceError, PlanError
from aliquot.machine.cpu import FLOP_PER_CYCLE
from aliquot.planner.planned_machine import INSTRUCTION_SETS, Machine, machine_from_options
from aliquot.planner.planner import plan
from tests.planner.shapes import LLAMA, planned_config


def test_rank_has_one_gpu() -> None:
    machine = Machine.from_instance("g6e.12xlarge")
    assert machine.gpus == 4
    config = planned_config(LLAMA, launch={"device": "cuda"})
    for ranks in (1, 4):
        assert plan(config, machine, 1, ranks).limit_bytes == machine.gpu_memory_bytes
    with pytest.raises(DeviceError, match="8 ranks a node need a GPU each"):
        plan(config, machine, 1, 8)


def test_sockets() -> None:
    two = ("m5.24xlarge", "c6i.32xlarge", "c7i.48xlarge", "c6a.48xlarge", "m7a.48xlarge")
    nodes = dict.fromkeys(two, 2) | {"c8g.24xlarge": 1}
    assert {name: Machine.from_instance(name).numa_nodes for name in nodes} == nodes


def test_instruction_sets_of_ec2_processors() -> None:
    """Haswell and Broadwell have no AVX-512, Ivy Bridge no AVX2."""
    first = {
        name: Machine.from_instance(name).isa[0] for name in ("c3.8xlarge", "c4.8xlarge", "c5.9xlarge", "c7i.8xlarge")
    }
    assert list(first.values()) == ["avx", "avx2", "avx512f", "amx_bf16"]


@pytest.mark.parametrize(
    ("machine", "precision"),
    [
        *((Machine.from_numbers(64, 8, None, isa), "bf16") for isa in ("amx", "avx512_bf16", "sve_bf16")),
        *((Machine.from_numbers(64, 8, None, isa), "fp32") for isa in ("avx512", "avx2", "neon")),
        *((Machine.from_instance(name), "bf16") for name in ("c7i.xlarge", "c7a.xlarge", "c8g.xlarge", "g5.xlarge")),
        *((Machine.from_instance(name), "fp32") for name in ("c6i.xlarge", "c6a.xlarge", "c6g.xlarge")),
    ],
    ids=lambda value: value.name if isinstance(value, Machine) else value,
)  # fmt: skip
def test_precision_follows_the_instructions_of_the_processor(machine: Machine, precision: str) -> None:
    choices, launch = ("auto", precision), {"device": "auto"}
    configs = (planned_config(LLAMA, train={"precision": choice}, launch=launch) for choice in choices)
    automatic, chosen = (plan(config, machine, 1, 1) for config in configs)
    assert automatic == chosen and automatic.precision == precision


def test_instruction_sets_of_own_machines() -> None:
    choices = typing.get_type_hints(plan_command.command)["isa"]
    assert set(typing.get_args(typing.get_args(choices)[0])) == set(INSTRUCTION_SETS)
    assert {name for names in INSTRUCTION_SETS.values() for name in names} <= FLOP_PER_CYCLE.keys()
    assert machine_from_options(None, 256, 64, "amx", None).isa[0] == "amx_bf16"
    assert machine_from_options(None, 256, 64, None, None).isa[0] == "avx512_bf16"
    for options in ((None, 256, None, None, None), (None, None, 64, None, None), (None, None, None, "amx", None)):
        with pytest.raises(PlanError, match=r"describes another machine, which needs --cores .* and --memory"):
            machine_from_options(*options)
    with pytest.raises(PlanError, match=r"--instance c7i.large has its own cores and memory: leave out --cores, --isa"):
        machine_from_options("c7i.large", None, 2, "amx", None)
