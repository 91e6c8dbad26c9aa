"""The shipped catalogue: complete, dated, and in agreement with Karpenter's formula and what the AWS console shows."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files

import pytest

from aliquot.catalogue.instances import (
    allocatable_cpu_millicores,
    allocatable_memory_bytes,
    instance,
    instances,
    shipped_catalogue,
)
from aliquot.core.errors import UserError

GIB = 1 << 30
MIB = 1 << 20


def test_every_type_has_karpenters_allocatable_memory() -> None:
    assert len(instances()) == 1364
    for each in instances():
        expected = allocatable_memory_bytes(each.memory_bytes, each.max_pods, each.arch)
        assert each.allocatable_memory_bytes == expected, each.name


def test_every_type_has_karpenters_allocatable_cpu() -> None:
    for each in instances():
        assert each.allocatable_cpu_millicores == allocatable_cpu_millicores(each.vcpus), each.name


def test_gpu_type() -> None:
    node = instance("g6e.8xlarge")
    assert (node.gpus, node.gpu_name, node.gpu_memory_bytes) == (1, "l40s", 45_776 * MIB)
    assert (node.efa_interfaces, node.amx, node.local_nvme_bytes) == (1, False, 900 * 10**9)


def test_huge_pages_of_nodes_with_efa() -> None:
    """Against `hugepages-2Mi` and the allocatable memory of real EKS nodes, and Karpenter's estimate."""
    small, large, cpu = instance("g6.48xlarge"), instance("p4de.24xlarge"), instance("r7i.8xlarge")
    seen, kept = 786_432 * 96 // 100, 255 + 11 * small.max_pods + 100
    assert small.schedulable_bytes(uses_efa=True) // MIB == seen - 42_242 - kept
    assert small.schedulable_bytes(uses_efa=True) < small.schedulable_bytes(uses_efa=False)
    assert large.schedulable_bytes(uses_efa=True) == large.allocatable_memory_bytes < 1_146_004_920 << 10
    assert cpu.efa_interfaces == 0 and cpu.schedulable_bytes(uses_efa=True) == cpu.allocatable_memory_bytes


def test_amx_is_sapphire_rapids_and_later() -> None:
    families = {each.family for each in instances() if each.amx}
    assert {"c7i", "m7i", "r7i", "r7iz", "i7i", "i7ie", "u7i-12tb", "c7i-flex", "m7i-flex"} <= families
    assert {"c8i", "m8i", "r8i", "x8i", "c8i-flex", "c8ib", "m8in", "g7e", "p5en", "p6-b200", "trn2"} <= families
    assert not families & {"c6i", "m6i", "c7a", "m7g", "i4i", "p5", "g6e", "c7gn", "hpc7a", "hpc6id", "x8g", "m8a"}


def test_cores_where_a_vcpu_is_a_core() -> None:
    for name in ("c7g.4xlarge", "c7a.4xlarge", "m8a.4xlarge", "hpc6id.32xlarge", "t2.large"):
        assert instance(name).physical_cores == instance(name).vcpus
    assert instance("c6a.4xlarge").physical_cores == 8
    assert instance("a1.medium").physical_cores == 1


@pytest.mark.parametrize("wrong, near", [("c7i.8xlarg", "c7i.8xlarge"), ("g6e8xlarge", "g6e.8xlarge")])
def test_unknown_name_gets_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(UserError, match=near):
        instance(wrong)


def test_source_and_date_are_in_the_file() -> None:
    source = json.loads(files("aliquot.catalogue").joinpath("ec2-instances.json").read_text())["source"]
    assert "Karpenter" in source and shipped_catalogue().date in source and shipped_catalogue().region in source


def test_types_of_2026() -> None:
    g7, c9g = instance("g7.48xlarge"), instance("c9g.8xlarge")
    assert (g7.gpus, g7.gpu_name, g7.gpu_memory_bytes, g7.efa_interfaces, g7.amx) == (
        8,
        "rtx-pro-4500",
        32 * GIB,
        2,
        True,
    )
    assert (c9g.physical_cores, c9g.network_bytes_per_s, c9g.usd_per_hour) == (32, 2_125_000_000, 1.39104)


def test_loads_nothing_heavy() -> None:
    code = (
        "import sys; from aliquot.catalogue.instances import instance; instance('c7i.large');"
        "sys.exit(bool({'torch', 'numpy', 'pydantic', 'yaml', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
