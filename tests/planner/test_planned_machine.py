"""Devices, ranks and instruction sets of planned machines."""

from __future__ import annotations

import pytest

from aliquot.core.errors import DeviceError
from aliquot.planner.planned_machine import Machine
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
