"""How fast a rank computes and moves bytes: measured on this machine (profiles.py), or estimated for any other.

An estimate is a peak from the maker's documents times a fraction that plain matmuls of training reach. It is an
assumption, is always shown as one, and is replaced by a measurement where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from aliquot.distributed.topology import RankLayout
from aliquot.machine.cpu import FLOP_PER_CYCLE
from aliquot.optim.sizes import States
from aliquot.planner.planned_machine import Machine


class Rates(Protocol):
    """Of one rank while all ranks of its node are busy."""

    @property
    def source(self) -> str:
        """For the reader: measured when, or estimated from what."""
        ...

    @property
    def off_by(self) -> float:
        """Factor by which times may be wrong, either way; 1: they were measured."""
        ...

    def matmul_s(self, batch: int, m: int, k: int, n: int, itemsize: int) -> float:
        """Seconds of `batch` products [m, k] x [k, n]."""
        ...

    def memory_s(self, operation: str, tensor_bytes: int, moved_bytes: float) -> float:
        """Seconds of an elementwise operation or reduction that moves so many bytes in tensors of that size."""
        ...

    def overhead_s(self, calls: float) -> float: ...

    def sum_s(self, itemsize: int, sources: int, numel: float) -> float:
        """Seconds to add gradients in bf16 of so many ranks to so many sums of 4 or 2 bytes."""
        ...

    def update_s(self, states: States, numel: float, moved_bytes: float, in_one_pass: bool) -> float:
        """Seconds of AdamW over so many weights, which moves so many bytes; `in_one_pass`: it does nothing else."""
        ...

    def stage_s(self, moved_bytes: float) -> float:
        """Seconds to read and write so many bytes in memory for gradients, their sums and the update."""
        ...

    def gloo_s(self, sent_bytes: float) -> float:
        """Seconds in which gloo and the kernel have a core, when a rank sends and receives as much."""
        ...

    def patch_s(self, weights_bytes: float) -> float:
        """Seconds of a core to encode, or to decode, what a step has changed in so many bytes of weights in bf16."""
        ...

    def wire_s(self, sent_bytes: float) -> float:
        """Seconds to send so many bytes between hosts from one node."""
        ...

    def local_s(self, sent_bytes: float) -> float:
        """Seconds to send so many bytes among the ranks of a host through sockets."""
        ...


# What plain products of training shapes reach of that. AMX: 2 TB/s of tiles to feed from caches; published oneDNN
# figures for bf16 matmul on Sapphire Rapids lie at 40 to 60 % of peak. AVX: 80 % (85 % measured on Zen 5).
_REACHED = {"amx_bf16": 0.4, "avx512_bf16": 0.8, "sve_bf16": 0.7, "avx512f": 0.8, "avx2": 0.8, "avx": 0.8, "neon": 0.8}
_FP32_REACHED = 0.8
_CLOCK_HZ = 2.6e9  # where it is not known: an all-core clock of servers
CORE_MEMORY_BYTES_PER_S = 5e9  # DDR5 of a server, 8 channels of 38 GB/s for 48 cores, at 80 %
_CACHED_FACTOR = 4.0  # tensors that stay in a core's cache move so much faster
_CACHE_BYTES = 2 << 20
_CALL_S = 6e-6  # an operation with autograd around it, whatever its size
_PATCH_BYTES_PER_S = 1.5e9  # 1.6 and 1.9 on Zen 4, 0.8 and 1.2 on Zen 3 (benchmarks/patches.py)
# 0.32 s for 222 MB each way on one core of Zen 4, between hosts; 0.28 s beside what its socket takes for 204 MB with
# AMX, on one host; assumed for any.
GLOO_BYTES_PER_S = 0.7e9
_SOCKET_BYTES_PER_S = 1.5e9  # loopback TCP through gloo, a rank
_NETWORK_REACHED = 0.8  # of the nominal rate, by gloo

# Dense bf16 and fp32 FLOP/s, memory bytes/s, and NVLink bytes/s in one direction (None: PCIe), from NVIDIA's data
# sheets. T4 and V100 have no bf16: what computes in it there is computed in fp32.
_GPUS: dict[str, tuple[float, float, float, float | None]] = {
    "t4": (8.1e12, 8.1e12, 320e9, None),
    "v100": (15.7e12, 15.7e12, 900e9, 150e9),
    "a10g": (70e12, 31e12, 600e9, None),
    "l4": (121e12, 30e12, 300e9, None),
    "l40s": (362e12, 91e12, 864e9, None),
    "rtxpro6000": (500e12, 117e12, 1597e9, None),
    "rtxproserver6000": (500e12, 117e12, 1597e9, None),
    "a100": (312e12, 19.5e12, 2039e9, 300e9),
    "h100": (989e12, 67e12, 3350e9, 450e9),
    "h200": (989e12, 67e12, 4800e9, 450e9),
    "b200": (2250e12, 75e12, 8000e9, 900e9),
    "b300": (2250e12, 75e12, 8000e9, 900e9),
}
_GPU_REACHED = 0.45  # an assumption
_HOPPER_REACHED = 0.75  # 762 TFLOP/s, by the products of a step of a Llama of 1.2 B on an H200 (torch 2.11)
_GPU_FP32_REACHED = 0.8
_OFF_BY_OF_ANOTHER = 10.0  # of a GPU that is not among them
ASSUMED_NETWORK, _NETWORK_BYTES_PER_S = "10 Gbit/s between hosts assumed", 1.25e9
OFF_BY = 2.5  # on machines that were measured afterwards, estimates were up to 2.4 times too slow
_PCIE_BYTES_PER_S = 20e9  # among the GPUs of a host without NVLink: PCIe 4
_NVLINK_REACHED = 0.75  # by NCCL's rings, of one direction


@dataclass(frozen=True)
class Estimated:
    """From the instruction set, the clock and the number of threads."""

    source: str
    bf16_flops: float
    fp32_flops: float
    memory_bytes_per_s: float
    network_bytes_per_s: float
    local_bytes_per_s: float
    call_s: float
    off_by: float = OFF_BY

    def matmul_s(self, batch: int, m: int, k: int, n: int, itemsize: int) -> float:
        flops = self.bf16_flops if itemsize == 2 else self.fp32_flops
        return 2.0 * batch * m * k * n / flops

    def memory_s(self, operation: str, tensor_bytes: int, moved_bytes: float) -> float:
        factor = _CACHED_FACTOR if tensor_bytes <= _CACHE_BYTES else 1.0
        return moved_bytes / (self.memory_bytes_per_s * factor)

    def overhead_s(self, calls: float) -> float:
        return calls * self.call_s

    def sum_s(self, itemsize: int, sources: int, numel: float) -> float:
        return self.stage_s(numel * (2 * sources + 2 * itemsize))

    def update_s(self, states: States, numel: float, moved_bytes: float, in_one_pass: bool) -> float:
        return self.stage_s(moved_bytes)

    def stage_s(self, moved_bytes: float) -> float:
        return moved_bytes / self.memory_bytes_per_s

    def gloo_s(self, sent_bytes: float) -> float:
        return sent_bytes / GLOO_BYTES_PER_S

    def patch_s(self, weights_bytes: float) -> float:
        return weights_bytes / _PATCH_BYTES_PER_S

    def wire_s(self, sent_bytes: float) -> float:
        return sent_bytes / self.network_bytes_per_s if sent_bytes else 0.0

    def local_s(self, sent_bytes: float) -> float:
        return sent_bytes / self.local_bytes_per_s


def estimated(machine: Machine, layout: RankLayout) -> Estimated:
    """Rates of a rank on a machine that has not been measured."""
    network = (machine.network_bytes_per_s or _NETWORK_BYTES_PER_S) * _NETWORK_REACHED
    assumed = "" if machine.network_bytes_per_s else f", {ASSUMED_NETWORK}"
    if layout.device == "cuda":
        name = known_gpu(machine.gpu_name)
        flops, fp32_flops, memory, nvlink = _GPUS[name or "l4"]
        if "pcie" in _plain(machine.gpu_name):
            nvlink = None
        link = _PCIE_BYTES_PER_S if nvlink is None else nvlink * _NVLINK_REACHED
        linked = f", {'PCIe' if nvlink is None else 'NVLink'} at {link / 1e9:.0f} GB/s" if machine.gpus > 1 else ""
        fp32 = fp32_flops * _GPU_FP32_REACHED
        slower = any(form in _plain(machine.gpu_name) for form in ("pcie", "nvl"))  # than the data sheet of SXM says
        reached = _HOPPER_REACHED if name in ("h100", "h200") and not slower else _GPU_REACHED
        bf16 = flops * reached if flops > fp32_flops else fp32
        of = f"{name.upper()}'s data sheet" if name else f"an L4's data sheet: {machine.gpu_name}'s is not known"
        of += ", as one H200 reached" if reached == _HOPPER_REACHED else ""
        without = ", which has no bf16" if bf16 == fp32 else ""
        said = f"estimate: {bf16 / flops:.0%} of {flops / 1e12:.0f} TFLOP/s ({of}{without}){linked}{assumed}"
        off_by = OFF_BY if name else _OFF_BY_OF_ANOTHER
        return Estimated(said, bf16, fp32, memory * 0.7, network, link, _CALL_S / 2, off_by)
    isa = next((name for name in FLOP_PER_CYCLE if name in machine.isa), "avx2")
    clock = machine.clock_hz or _CLOCK_HZ
    threads = min(layout.threads_per_rank, machine.cores / layout.ranks_per_node)  # more share cores
    reached, (peak, fp32_peak) = _REACHED[isa], FLOP_PER_CYCLE[isa]
    peaks = f"{peak} bf16, {_FP32_REACHED:.0%} of {fp32_peak} fp32 FLOP a cycle ({isa}) at {clock / 1e9:.2f} GHz"
    return Estimated(
        source=f"estimate, not measured: {reached:.0%} of {peaks} a core{assumed}",
        bf16_flops=peak * clock * threads * reached,
        fp32_flops=fp32_peak * clock * threads * _FP32_REACHED,
        memory_bytes_per_s=CORE_MEMORY_BYTES_PER_S * threads,
        network_bytes_per_s=network,
        local_bytes_per_s=_SOCKET_BYTES_PER_S,
        call_s=_CALL_S,
    )


def known_gpu(name: str | None) -> str | None:
    """Of which of the data sheets a GPU of that name is; None: of none."""
    return next((known for known in sorted(_GPUS, key=len, reverse=True) if known in _plain(name)), None)


def _plain(name: str | None) -> str:
    return (name or "").lower().replace("-", "").replace(" ", "")


def interpolated(table: Sequence[tuple[float, float]], at: float) -> float:
    """Value at `at` of points (x, y) in ascending order, linear in the logarithm of x, flat beyond the ends."""
    if at <= table[0][0]:
        return table[0][1]
    for (x0, y0), (x1, y1) in pairwise(table):
        if at <= x1:
            return y0 + (y1 - y0) * math.log(at / x0) / math.log(x1 / x0)
    return table[-1][1]
