"""Rates of a rank for matrix products, memory, calls, sockets and network: measured, or estimated from data sheets.

An estimate is the peak of the data sheet times the fraction of it that plain matrix products of training reach. Plans
show estimates with an error range until a measurement replaces them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from aliquot.distributed.topology import RankLayout
from aliquot.machine.cpu import FLOP_PER_CYCLE
from aliquot.planner.measure_rates import KINDS, Curve
from aliquot.planner.planned_machine import Machine

PCIE_BYTES_PER_S = 22e9  # of pinned memory through 16 lanes of PCIe 4, assumed; twice as much through PCIe 5
_PCIE_5 = ("h100", "h200", "b200", "b300", "rtx5090", "rtxpro4500", "rtxpro6000", "rtxproserver6000")
_STATES_BYTES = 4 << 20  # of a block of gradients or states, which is not in a CPU cache
_EXP = ("softmax", "silu", "sigmoid", "exp", "tanh", "gelu", "erf", "pow", "rsqrt")


@dataclass(frozen=True)
class Rates:
    """Speeds of one rank while all ranks of its node are busy."""

    source: str  # text for people: when the rates were measured, or what they are estimated from
    products: Mapping[int, Curve]  # itemsize -> (side of square matrices, FLOP/s)
    memory: Mapping[str, Curve]  # kind of operation -> (bytes of a tensor, bytes/s)
    call_s: float  # overhead of calling a torch operation
    socket_bytes_per_s: float  # from a rank to ranks of its host, or from GPU to GPU
    gloo_bytes_per_s: float  # sent and received by a rank while gloo and the Linux kernel occupy its core
    network_bytes_per_s: float  # from a node to other nodes
    off_by: float  # factor by which times may be wrong, either way
    pcie_bytes_per_s: float = PCIE_BYTES_PER_S  # between a GPU and pinned host memory, in each direction
    is_sure: bool = True  # False: the machine had other work during the measurement, which slows rates unequally

    def matmul_s(self, batch: int, m: int, k: int, n: int, itemsize: int) -> float:
        """Return the seconds of `batch` products [m, k] x [k, n].

        The rate is that of square matrices with as many operations, or a lower rate if a side is very short.
        """
        side = min((batch * m * k * n) ** (1 / 3), 4.0 * min(m, k, n))
        return 2.0 * batch * m * k * n / interpolate(self.products[itemsize], side)

    def memory_s(self, operation: str, tensor_bytes: int, moved_bytes: float) -> float:
        """Return the seconds in which an elementwise operation or reduction moves `moved_bytes`.

        Args:
            tensor_bytes: size of the largest tensor; small tensors are in a CPU cache.
        """
        return moved_bytes / interpolate(self.memory[_kind(operation)], max(1, tensor_bytes))

    def sent_bytes_per_s(self, layout: RankLayout) -> float:
        """Return the rate at which a node sends to other nodes. On CPU, gloo occupies the cores of the ranks."""
        if layout.device == "cuda":
            return self.network_bytes_per_s
        return min(self.network_bytes_per_s, layout.ranks_per_node * self.gloo_bytes_per_s)

    def states_s(self, moved_bytes: float) -> float:
        """Return the seconds to read and write `moved_bytes` of gradients, gradient sums and optimizer states."""
        return self.memory_s("add_", _STATES_BYTES, moved_bytes)


# Fractions of the peak that plain products of training reach. AMX: caches must feed 2 TB/s of tiles; published oneDNN
# figures for bf16 on Sapphire Rapids lie at 40 to 60 % of peak. AVX: 85 % measured on Zen 5.
_REACHED = {"amx_bf16": 0.4, "avx512_bf16": 0.8, "sve_bf16": 0.7, "avx512f": 0.8, "avx2": 0.8, "avx": 0.8, "neon": 0.8}
_FP32_REACHED = 0.8
_CLOCK_HZ = 2.6e9  # all-core clock of servers, if the clock is unknown
CORE_MEMORY_BYTES_PER_S = 5e9  # 80 % of the DDR5 of a server: 8 channels of 38 GB/s for 48 cores
_CACHED_FACTOR, _CACHE_BYTES = 4.0, 2 << 20  # tensors in the cache of a core are read and written faster
_CALL_S = 6e-6  # overhead of an operation with autograd
GLOO_BYTES_PER_S = 0.7e9  # 222 MB in each direction in 0.32 s on one core of Zen 4, between hosts; assumed for all
_SOCKET_BYTES_PER_S = 1.5e9  # per rank, by gloo over loopback TCP
_NETWORK_REACHED = 0.8  # fraction of the nominal rate that gloo reaches

# Dense bf16 and fp32 FLOP/s, memory bytes/s, and NVLink bytes/s in one direction (None: PCIe), from NVIDIA's data
# sheets. FLOP/s of the RTX PRO 4500 are those of the RTX PRO 6000 in proportion to their CUDA cores.
_GPUS: dict[str, tuple[float, float, float, float | None]] = {
    "a10g": (70e12, 31e12, 600e9, None),
    "l4": (121e12, 30e12, 300e9, None),
    "l40s": (362e12, 91e12, 864e9, None),
    "rtxpro4500": (218e12, 51e12, 800e9, None),
    "rtxpro6000": (500e12, 117e12, 1597e9, None),
    "rtxproserver6000": (500e12, 117e12, 1597e9, None),
    "rtx3090": (71e12, 35.6e12, 936e9, None),
    "rtx4090": (165e12, 82.6e12, 1008e9, None),
    "rtx5090": (209e12, 105e12, 1792e9, None),
    "a100": (312e12, 19.5e12, 2039e9, 300e9),
    "h100": (989e12, 67e12, 3350e9, 450e9),
    "h200": (989e12, 67e12, 4800e9, 450e9),
    "b200": (2250e12, 75e12, 8000e9, 900e9),
    "b300": (2250e12, 75e12, 8000e9, 900e9),
}
_GPU_REACHED, _GPU_FP32_REACHED, _GPU_MEMORY_REACHED = 0.45, 0.8, 0.7  # assumptions
# Hopper: 762 TFLOP/s, by the products of a step of a Llama of 1.2 B on an H200 (torch 2.11). RTX 4090: the median of
# 152 to 165 TFLOP/s, by square bf16 products of 2,048 to 10,240 rows in torch 2.7
# (github.com/zzc0721/torch-performance-test-data, issue 78).
_REACHED_BY = {"h100": 0.75, "h200": 0.75, "rtx4090": 0.96}
# No run on several GPUs was measured, so published runs bound their products. torchtitan trains Llama 3 8B at 5,600 to
# 6,700 tokens/s on each of 8 to 128 H100, with sequences of 8,192: at most 34 % of the data sheet, if attention counts
# causal products alone, and 39 % as torchtitan counts ("The Llama 3 Herd of Models", table 4, counts 38 to 43 %).
_PUBLISHED_REACHED = 0.34
_PUBLISHED = ", as torchtitan's best run of 8 B: 5,600 to 6,700 tokens/s an H100"
_LIKE_HOPPER = ("h100", "h200", "b200", "b300")
ASSUMED_NETWORK, _NETWORK_BYTES_PER_S = "10 Gbit/s between hosts assumed", 1.25e9
OFF_BY, _OFF_BY_UNKNOWN_GPU = 2.5, 10.0  # machines measured after an estimate were up to 2.4 times faster
_PCIE_PEER_BYTES_PER_S = 20e9  # PCIe 4, among the GPUs of a host without NVLink
_NVLINK_REACHED = 0.75  # fraction of the rate in one direction that NCCL's ring collectives reach


def estimated(machine: Machine, layout: RankLayout) -> Rates:
    """Return the rates of a rank on a machine that nobody has measured."""
    assumed = "" if machine.network_bytes_per_s else f", {ASSUMED_NETWORK}"
    if layout.device == "cuda":
        return _estimated_gpu(machine, layout, assumed)
    isa = next((name for name in FLOP_PER_CYCLE if name in machine.isa), "avx2")
    clock = machine.clock_hz or _CLOCK_HZ
    threads = min(layout.threads_per_rank, machine.cores / layout.ranks_per_node)  # more threads share cores
    reached, (peak, fp32_peak) = _REACHED[isa], FLOP_PER_CYCLE[isa]
    peaks = f"{peak} bf16, {_FP32_REACHED:.0%} of {fp32_peak} fp32 FLOP a cycle ({isa}) at {clock / 1e9:.2f} GHz"
    slowed = ", a clock that AMX may lower" if isa == "amx_bf16" else ""
    flops = {2: peak * clock * threads * reached, 4: fp32_peak * clock * threads * _FP32_REACHED}
    source = f"estimate, not measured: {reached:.0%} of {peaks} a core{slowed}{assumed}"
    return _flat(machine, source, flops, CORE_MEMORY_BYTES_PER_S * threads, _CALL_S, _SOCKET_BYTES_PER_S, OFF_BY)


def _estimated_gpu(machine: Machine, layout: RankLayout, assumed: str) -> Rates:
    name, plain_name = known_gpu(machine.gpu_name), _plain(machine.gpu_name)
    peak, fp32_peak, memory, nvlink = _GPUS[name or "l4"]
    if "pcie" in plain_name:
        nvlink = None
    link = _PCIE_PEER_BYTES_PER_S if nvlink is None else nvlink * _NVLINK_REACHED
    linked = f", {'PCIe' if nvlink is None else 'NVLink'} at {link / 1e9:.0f} GB/s" if machine.gpus > 1 else ""
    is_sxm = "pcie" not in plain_name and "nvl" not in plain_name  # the data sheet is for SXM modules
    reached = _REACHED_BY.get(name or "", _GPU_REACHED) if is_sxm else _GPU_REACHED
    words = ", as one H200 reached" if reached == 0.75 else ""
    if layout.world_size > 1 and name in _LIKE_HOPPER and is_sxm:
        reached, words = _PUBLISHED_REACHED, _PUBLISHED
    bf16, fp32 = peak * reached, fp32_peak * _GPU_FP32_REACHED
    sheet = f"{name.upper()}'s data sheet" if name else f"an L4's data sheet: {machine.gpu_name}'s is not known"
    source = f"estimate: {reached:.0%} of {peak / 1e12:.0f} TFLOP/s ({sheet}{words}){linked}{assumed}"
    off_by = OFF_BY if name else _OFF_BY_UNKNOWN_GPU
    rates = _flat(machine, source, {2: bf16, 4: fp32}, _GPU_MEMORY_REACHED * memory, _CALL_S / 2, link, off_by)
    return replace(rates, pcie_bytes_per_s=2 * PCIE_BYTES_PER_S) if name in _PCIE_5 else rates


def _flat(
    machine: Machine, source: str, flops: dict[int, float], memory: float, call_s: float, link: float, off_by: float
) -> Rates:
    """Return rates that do not depend on tensor sizes, except that tensors in a CPU cache are faster."""
    curve = ((float(_CACHE_BYTES), _CACHED_FACTOR * memory), (_CACHE_BYTES + 1.0, memory))
    return Rates(
        source=source,
        products={itemsize: ((1.0, rate),) for itemsize, rate in flops.items()},
        memory=dict.fromkeys(KINDS, curve),
        call_s=call_s,
        socket_bytes_per_s=link,
        gloo_bytes_per_s=GLOO_BYTES_PER_S,
        network_bytes_per_s=network_bytes_per_s(machine),
        off_by=off_by,
    )


def network_bytes_per_s(machine: Machine) -> float:
    return (machine.network_bytes_per_s or _NETWORK_BYTES_PER_S) * _NETWORK_REACHED


def known_gpu(name: str | None) -> str | None:
    """Return the key in `_GPUS` of the data sheet that matches a GPU's name; None for others, and for a part (MIG)."""
    known = sorted(_GPUS, key=len, reverse=True)
    return next((sheet for sheet in known if sheet in _plain(name) and "mig" not in _plain(name)), None)


def _plain(name: str | None) -> str:
    return (name or "").lower().replace("-", "").replace(" ", "")


def _kind(operation: str) -> str:
    """Return the kind in KINDS whose measured rate applies to an operation of ATen."""
    if operation in ("tanh_backward", "sigmoid_backward"):
        return "stream"  # only multiply with the saved result
    if any(name in operation for name in _EXP):
        return "exp"
    return "transpose" if operation == "transpose" else "stream"


def interpolate(curve: Curve, at: float) -> float:
    """Interpolate points (x, y) at x = `at`: linear in the logarithm of x, and constant beyond the ends."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if at <= x1:
            return y0 + (y1 - y0) * math.log(at / x0) / math.log(x1 / x0)
    return curve[-1][1]
