"""States on disk on a cluster: room for them is asked for, on the machine's own disks where it has some."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import yaml

from aliquot.cluster.render import documents
from aliquot.core.errors import ClusterError
from tests.cluster.cases import cpu_job, disk_job


def found(job: Any, kind: str) -> Any:
    return next(each for each in documents(job).values() if each["kind"] == kind)


def told(value: Any, key: str) -> list[Any]:
    """All values under `key`, wherever they stand."""
    if isinstance(value, list):
        return [each for item in value for each in told(item, key)]
    if not isinstance(value, dict):
        return []
    return [*([value[key]] if key in value else []), *(each for item in value.values() for each in told(item, key))]


@pytest.mark.parametrize("trainer", ["2.1", "2.3"])
def test_room_is_asked_for(trainer: str) -> None:
    job = disk_job(trainer=trainer)
    assert found(job, "EC2NodeClass")["spec"]["instanceStorePolicy"] == "RAID0"
    every = list(documents(job).values())
    assert set(told(every, "ephemeral-storage")) == {"64717Mi"}  # 60 GiB, a fiftieth more, and 2 GiB for logs
    assert {"name": "offload", "emptyDir": {"sizeLimit": "62669Mi"}} in chain(*told(every, "volumes"))
    assert {"name": "offload", "mountPath": "/offload"} in chain(*told(every, "volumeMounts"))
    shipped = yaml.safe_load(found(job, "ConfigMap")["data"]["config.yaml"])
    assert shipped["shard"] == {"offload": "disk", "engine": "host", "offload_directory": "/offload"}


def test_scratch_lies_on_the_volume_without_local_disks() -> None:
    job = disk_job(instance_types=["r7i.8xlarge"], volume_gib=200)
    spec = found(job, "EC2NodeClass")["spec"]
    assert "instanceStorePolicy" not in spec
    assert spec["blockDeviceMappings"][0]["ebs"].items() >= {"throughput": 1000, "iops": 4000}.items()
    with pytest.raises(ClusterError, match=r"puts 61 GiB on each node, and cluster\.volume_gib leaves 14 GiB"):
        disk_job(instance_types=["r7i.8xlarge"], volume_gib=50)
    with pytest.raises(
        ClusterError, match=r"puts 2040 GiB on each node, and the disks of r6id\.8xlarge leave 1582 GiB"
    ):
        disk_job(scratch_gib=2000)


def test_fitting_job_asks_for_no_scratch() -> None:
    every = list(documents(cpu_job()).values())
    assert not told(every, "ephemeral-storage") and not told(every, "instanceStorePolicy")
