"""Configs and plans of the seeds' two jobs, and of a small one, made directly: rendering needs nothing else."""

from __future__ import annotations

from typing import Any

from aliquot.cluster.job import Job, describe
from aliquot.config.schema import RunConfig
from aliquot.planner.plan import PhaseMemory, Plan

GIB = 1 << 30


def cluster_section(**changes: Any) -> dict[str, Any]:
    return {
        "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/aliquot:0.1.0",
        "nodes": 4,
        "instance_types": ["r7i.8xlarge"],
        "zone": "us-east-1a",
        "discovery": "training-on-eks",
        "node_role": "eksctl-KarpenterNodeRole-training-on-eks",
        "ami": "al2023@v20260903",
        "huggingface_secret": {"name": "hf-token"},
        "storage": {
            "file_system_id": "fs-0199e5a63bd90f796",
            "dnsname": "fs-0199e5a63bd90f796.fsx.us-east-1.amazonaws.com",
            "mountname": "fsx",
            "deployment_type": "PERSISTENT_2",
        },
        **changes,
    }


def config(cluster: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "llama3-8b"},
            "model": {"path": "meta-llama/Meta-Llama-3-8B"},
            "data": {"dataset": "wikitext", "dataset_config": "wikitext-2-raw-v1", "sequence_length": 512},
            "train": {"max_steps": 1000, "learning_rate": 2e-5},
            "checkpoint": {"every": 100},
            "cluster": cluster or cluster_section(),
            **sections,
        }
    )


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "model": "LlamaForCausalLM",
        "parameters": 8_030_261_248,
        "engine": "host",
        "precision": "bf16",
        "device": "cpu",
        "nodes": 4,
        "ranks_per_node": 2,
        "threads_per_rank": 8,
        "instance": "r7i.8xlarge",
        "phases": (PhaseMemory("steady peak", {"moments": 20 * GIB, "gradients": 10 * GIB}, {"weights": 16 * GIB}),),
        "shm_bytes_per_node": 0,
        "limit_bytes_per_node": 230 * GIB,
        "wire_bytes_per_step": 10 * GIB,
        "local_bytes_per_step": 0,
        "disk_read_bytes": 16 * GIB,
        "checkpoint_bytes": 96 * GIB,
        "steps": 1000,
        "tokens_per_step": 2048.0,
        "step_s": 12.5,
        "save_steps": 100,
        "bottleneck": "compute-bound",
        "rates": "the catalogue's",
        "usd_per_hour": 8.4672,
        **changes,
    }
    return Plan(**values)


def cpu_job(**changes: Any) -> Job:
    return describe(config(cluster_section(**changes)), plan())


def disk_job(scratch_gib: int = 60, **changes: Any) -> Job:
    """States that do not fit lie on the nodes' own disks, by default those of the machine."""
    section = cluster_section(**{"instance_types": ["r6id.8xlarge"], **changes})
    return describe(config(section, shard={"offload": "disk"}), plan(scratch_bytes_per_node=scratch_gib * GIB))


def gpu_job(engine: str = "fsdp", **changes: Any) -> Job:
    section = cluster_section(**{"instance_types": ["g6e.8xlarge"], **changes})
    foreseen = plan(
        engine=engine, device="cuda", ranks_per_node=1, threads_per_rank=16, instance="g6e.8xlarge",
        limit_bytes_per_node=44 * GIB, shm_bytes_per_node=0, usd_per_hour=18.1,
        phases=(PhaseMemory("steady peak", {"moments": 36 * GIB}, {}),),
    )  # fmt: skip
    return describe(config(section, launch={"device": "cuda"}), foreseen)


def dynamic_storage() -> dict[str, Any]:
    return {
        "kind": "fsx-dynamic",
        "subnet_id": "subnet-0eabfaa81fb22bcaf",
        "security_group_ids": ["sg-068000ccf82dfba88"],
        "deployment_type": "PERSISTENT_2",
    }
