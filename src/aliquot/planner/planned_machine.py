"""The machine of a plan: this machine, an EC2 type, or a machine of given memory and cores."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from aliquot.catalogue.instances import InstanceType, instance
from aliquot.config.schema import RunConfig
from aliquot.core.errors import DeviceError, PlanError
from aliquot.distributed.auto_ranks import cpu_ranks
from aliquot.distributed.launcher import apply_environment
from aliquot.distributed.topology import RankLayout, old_gpu, threads_per_rank
from aliquot.machine.allocator import training_allocator
from aliquot.machine.cpu import CpuFacts, Precision, cpuinfo, faster_precision, read_cpu
from aliquot.machine.memory import AMPERE, has_gpus, memory_limit
from aliquot.machine.storage import nearest_directory, written_bytes_per_s
from aliquot.machine.torch_compile import can_compile

GIB = 1 << 30
DISK_BYTES_PER_S = 0.5e9  # per node, assumed: a cloud volume or file system; local NVMe is faster

# The most cores of one socket on EC2, by maker and generation: Cascade Lake 24, Ice Lake 32, Sapphire Rapids 48,
# Granite Rapids 96; Milan 48, Genoa and Turin 96; Graviton 96, Graviton 5 192. Other families (x2idn, u-6tb1): 48.
_SOCKET_CORES = {
    ("intel", 5): 24, ("intel", 6): 32, ("intel", 8): 96, ("amd", 7): 96, ("amd", 8): 96, ("aws", 9): 192,
}  # fmt: skip
# EC2's families of Intel processors without AVX-512 (Haswell, Broadwell), and without AVX2 (Sandy and Ivy Bridge).
_HASWELL = {"c4", "m4", "r4", "x1", "x1e", "d2", "h1", "i3", "t2"}
_IVY_BRIDGE = {"c1", "c3", "i2", "m1", "m2", "m3", "r3", "t1"}
_ADA = (8, 9)  # the first compute capability with instructions for fp8
_GPUS_BEFORE_ADA = {"a10g", "a100"}  # of EC2, without those that are too old


# The value of `aliquot plan --isa` -> the instruction sets of such a processor, the fastest first.
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "amx": ("amx_bf16", "avx512_bf16", "avx512f", "avx2"),
    "avx512_bf16": ("avx512_bf16", "avx512f", "avx2"),
    "avx512": ("avx512f", "avx2"),
    "avx2": ("avx2",),
    "sve_bf16": ("sve_bf16",),
    "neon": ("neon",),
}
_DEFAULT_ISA = "avx512_bf16"


@dataclass(frozen=True)
class Machine:
    """The resources of one node: cores, memory, GPUs, network and disks."""

    name: str
    instance: InstanceType | None
    cores: int
    memory_bytes: int  # memory for all ranks together
    numa_nodes: int
    network_bytes_per_s: float | None
    shm_bytes: int | None  # size of /dev/shm; None: unknown, because a pod mounts as much as it needs
    isa: tuple[str, ...]
    clock_hz: float | None
    gpus: int = 0
    gpu_name: str | None = None
    gpu_memory_bytes: int | None = None
    gpu_is_old: bool = False  # whether a GPU lacks kernels for attention
    gpu_has_fp8: bool = True
    disk_bytes_per_s: float | None = None  # of shard.offload_directory, both directions together
    written_bytes_per_s: float | None = None  # of checkpoints; None: not measured
    cpu: CpuFacts | None = None  # None: another machine than this one
    allocator: str = "tcmalloc"  # of training processes; the image of a cluster has tcmalloc
    can_compile: bool = True  # whether torch.compile finds a C++ compiler; the images of a cluster have one

    @property
    def is_local(self) -> bool:
        return self.cpu is not None

    @classmethod
    def local(cls, cpu: CpuFacts | None = None) -> Self:
        """Return this machine. `cpu`: facts from before this process was pinned to a few cores."""
        cpu = cpu or read_cpu()
        gpus, gpu_name, gpu_memory_bytes, capability = _gpus()
        return cls(
            name=cpu.model,
            instance=None,
            cores=cpu.usable_cores,
            memory_bytes=memory_limit(),
            numa_nodes=cpu.numa_nodes,
            network_bytes_per_s=None,
            shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
            isa=cpu.isa,
            clock_hz=float(mhz) * 1e6 if (mhz := cpuinfo().get("cpu MHz")) else None,
            gpus=gpus,
            gpu_name=gpu_name,
            gpu_memory_bytes=gpu_memory_bytes,
            gpu_is_old=capability[0] < AMPERE,
            gpu_has_fp8=capability >= _ADA,
            cpu=cpu,
            allocator=training_allocator(os.environ),
            can_compile=can_compile(os.environ),
        )

    @classmethod
    def from_instance(cls, name: str) -> Self:
        """Return a node of an EC2 type. Raises UserError for a name that is not in the catalogue."""
        ec2 = instance(name)
        socket_cores = _SOCKET_CORES.get((ec2.cpu_manufacturer, ec2.generation), 96 if ec2.arch == "arm64" else 48)
        return cls(
            name=ec2.name,
            instance=ec2,
            cores=ec2.physical_cores,
            memory_bytes=ec2.allocatable_memory_bytes,
            numa_nodes=-(-ec2.physical_cores // socket_cores),
            network_bytes_per_s=ec2.network_bytes_per_s,
            shm_bytes=None,
            isa=_isa(ec2),
            clock_hz=ec2.clock_mhz * 1e6 or None,
            gpus=ec2.gpus,
            gpu_name=ec2.gpu_name,
            gpu_memory_bytes=ec2.gpu_memory_bytes,
            gpu_is_old=ec2.has_old_gpu,
            gpu_has_fp8=ec2.gpu_name not in _GPUS_BEFORE_ADA,
        )

    @classmethod
    def from_numbers(cls, memory_gib: float, cores: int, network_gbit: float | None, isa: str = _DEFAULT_ISA) -> Self:
        """Return a machine of these numbers. `isa`: a key of INSTRUCTION_SETS."""
        return cls(
            name=f"{cores} cores, {memory_gib:g} GiB, {isa}",
            instance=None,
            cores=cores,
            memory_bytes=int(memory_gib * GIB),
            numa_nodes=1,
            network_bytes_per_s=None if network_gbit is None else network_gbit * 1e9 / 8,
            shm_bytes=None,
            isa=INSTRUCTION_SETS[isa],
            clock_hz=None,
        )

    def device(self, setting: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
        """Return the device that `launch.device` means here. Raises DeviceError for no GPUs or old ones."""
        if setting == "cuda" and not self.gpus:
            raise DeviceError(f"launch.device is cuda, but {self.name} has no GPU: set launch.device=cpu")
        if setting != "cpu" and self.gpu_is_old:
            raise old_gpu(f"{self.gpu_name} of {self.name}")
        return "cuda" if self.gpus and setting != "cpu" else "cpu"

    def faster_precision(self, device: Literal["cpu", "cuda"]) -> Precision:
        """Return the value of `train.precision: auto`: bf16 where matrix products are faster in bf16 than in fp32."""
        return "bf16" if device == "cuda" else faster_precision(self.isa)

    def layout(self, config: RunConfig, nodes: int | None = None, ranks_per_node: int | None = None) -> RankLayout:
        """Return the layout of ranks and threads of a run. `nodes` and `ranks_per_node` override `config`."""
        launch = apply_environment(config.launch, os.environ) if self.is_local else config.launch
        device = self.device(launch.device)
        nodes, ranks = nodes or launch.most_nodes, ranks_per_node or launch.ranks
        if ranks == "auto":
            on_cpu = device == "cpu"
            ranks = cpu_ranks(config, nodes, self._cpu(), self.memory_bytes)[0] if on_cpu else self.gpus
        if device == "cuda" and ranks > self.gpus:
            raise DeviceError(
                f"{ranks} ranks a node need a GPU each, and {self.name} has {self.gpus}: fewer launch.ranks"
            )
        threads, _ = threads_per_rank(launch, os.environ if self.is_local else {}, self._cpu(), ranks)
        return RankLayout(nodes, ranks, threads, device, self.numa_nodes)

    def _cpu(self) -> CpuFacts:
        if self.cpu is not None:
            return self.cpu
        cores = tuple((core,) for core in range(self.cores))
        node_of_core = tuple(core * self.numa_nodes // self.cores for core in range(self.cores))
        return CpuFacts(self.name, cores, None, self.numa_nodes, self.isa, node_of_core)

    def storage_bytes_per_s(self, config: RunConfig, nodes: int) -> float:
        """Return the rate at which all nodes together write a checkpoint."""
        if nodes == 1 and self.written_bytes_per_s is not None:
            return self.written_bytes_per_s
        assumed = DISK_BYTES_PER_S * nodes
        if config.cluster is None or self.instance is None:
            return assumed
        known = config.cluster.storage.written_bytes_per_s
        return assumed if known is None else min(assumed, known)


def machine_from_options(
    instance_name: str | None, memory_gib: float | None, cores: int | None, isa: str | None, network_gbit: float | None
) -> Machine:
    """Return the machine that the options of a command describe: by default this machine. Raises UserError."""
    numbers = {"--memory": memory_gib, "--cores": cores, "--isa": isa}
    options = [name for name, value in numbers.items() if value is not None]
    if instance_name is not None and options:
        raise PlanError(f"--instance {instance_name} has its own cores and memory: leave out {', '.join(options)}")
    if memory_gib is not None and cores is not None:
        return Machine.from_numbers(memory_gib, cores, network_gbit, isa or _DEFAULT_ISA)
    if options:
        raise PlanError(
            f"{options[0]} describes another machine, which needs --cores (physical cores) and --memory (GiB)"
        )
    machine = Machine.local() if instance_name is None else Machine.from_instance(instance_name)
    return machine if network_gbit is None else replace(machine, network_bytes_per_s=network_gbit * 1e9 / 8)


def _isa(ec2: InstanceType) -> tuple[str, ...]:
    """Return the instruction sets that determine the estimated rates. From Graviton 3 on, MMLA multiplies bf16."""
    if ec2.cpu_manufacturer == "intel":
        if ec2.family in _IVY_BRIDGE | _HASWELL:
            return ("avx",) if ec2.family in _IVY_BRIDGE else ("avx2",)
        return ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if ec2.amx else ("avx512f", "avx2")
    if ec2.cpu_manufacturer == "amd":
        return ("avx512_bf16", "avx512f", "avx2") if ec2.generation >= 7 else ("avx2",)
    return ("sve_bf16",) if ec2.generation >= 7 else ("neon",)


def _gpus() -> tuple[int, str | None, int | None, tuple[int, int]]:
    """Return the number of GPUs that torch sees; name, memory and compute capability of the first GPU."""
    if has_gpus():
        import torch

        if count := torch.cuda.device_count():
            properties = torch.cuda.get_device_properties(0)
            return count, str(properties.name), int(properties.total_memory), (properties.major, properties.minor)
    return 0, None, None, (AMPERE, 0)


def limit_to_pod(machine: Machine, config: RunConfig) -> Machine:
    """Reduce an EC2 node to the memory and cores of a pod, if `config` has a section `cluster`."""
    if (section := config.cluster) is None or (node := machine.instance) is None:
        return machine
    uses_efa = section.may_use_efa and node.gpus > 0
    return replace(
        machine,
        cores=max(1, min(machine.cores, section.pod_cpus(node.allocatable_cpu_millicores))),
        memory_bytes=max(1, section.pod_memory_bytes(node.schedulable_bytes(uses_efa))),
    )


def measure_disks(machine: Machine, config: RunConfig) -> Machine:
    """Measure the disks of this machine: for checkpoints 0.1 s, for optimizer state 0.5 s.

    Raises:
        StorageError: `shard.offload_directory` cannot be written.
    """
    if not machine.is_local:
        return machine
    if config.cluster is None:
        machine = replace(machine, written_bytes_per_s=written_bytes_per_s(nearest_directory(config.run.directory)))
    if config.shard.offload != "disk":
        return machine
    from aliquot.offload.scratch_file import disk_rate

    return replace(machine, disk_bytes_per_s=disk_rate(config.offload_directory))
