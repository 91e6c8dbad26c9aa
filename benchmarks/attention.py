"""Compare attention on CPU tiles (nn/attention/tiled_attention.py) with a native kernel (attention.cpp).

python benchmarks/attention.py --json attention.json [--cases 12/4x64:2048,...] [--rounds 5]

Each case is a row of documents: `mixed` is 2,048 tokens in documents of 65 tokens on average, `512x4` is four documents
of 512 tokens. `12/4x64` is 12 query heads and 4 key heads of width 64; `w512` is a sliding window. Ranks compute on one
core each, all at once. Both ways alternate; milliseconds are medians of a forward and a backward pass, and count only
while the rank had its core. Errors are norms of differences from fp32, relative to the norm of the result: the largest
of the output and the three gradients.

Decision rule: the kernel replaces the tiles if attention becomes 1.8 times as fast on AMX or Zen 5, and src shorter.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import smoke
from benchmarks.report import Row, finish, target
from benchmarks.worlds import run_world, tell

TITLE = "attention on CPU: tiles and a native kernel"
GOAL = 1.8
CASES = (
    "12/4x64:mixed", "12/4x64:65x32", "12/4x64:512x4", "12/4x64:2048x1", "12/4x64:2048x1:w512", "12/4x64:8192x1",
    "12/4x128:mixed", "12/4x128:512x4", "12/4x128:2048x1", "32/8x128:512x4",
)  # fmt: skip
MOST_CHECKED = 2100  # tokens of a row whose error is measured


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "width", "value_width", "window", "documents")),
        ("edges", ctypes.c_void_p), ("scaling", ctypes.c_double),
    )  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--cases", default=",".join(CASES))
    arguments.add_argument("--rounds", type=int, default=5)
    given = smoke.parse(arguments, cases="4/2x64:65x2,4/2x64:65x2:w20", rounds=1)
    from aliquot.machine.allocator import allocator_environment
    from aliquot.machine.matmul import matmul_kernel

    kernel = matmul_kernel("bf16")
    if not any(isa in kernel for isa in ("avx512_core_bf16", "amx")):
        note = f"the native kernel needs bf16 instructions of 512 bits, and products run in {kernel}"
        finish(TITLE, [{"case": "none", "note": note}], [], given.json)
        return
    environ = {"LD_PRELOAD": allocator_environment(os.environ).get("LD_PRELOAD", "")}
    rows: list[Row] = []
    for ranks in (1, 2):
        found = run_world(__file__, ranks, given.cases, str(given.rounds), environ=environ)[0]
        rows += [{"ranks": ranks, **row} for row in found.get("rows", [found])]
    targets = [
        target(f"attention_speedup_{row['ranks']}_{row['case']}", row["speedup"], GOAL, "higher")
        for row in rows
        if "case" in row
    ]
    finish(TITLE, rows, targets, given.json)


def lengths_of(documents: str) -> tuple[int, ...]:
    if documents != "mixed":
        length, count = map(int, documents.split("x"))
        return (length,) * count
    draw, left = random.Random(0), 2048
    lengths: list[int] = []
    while left:
        lengths.append(min(left, 1 + int(draw.expovariate(1 / 65))))
        left -= lengths[-1]
    return tuple(lengths)


def native() -> Callable[..., Tensor]:
    """Compile the kernel, as torch.compile would. Return attention [T, H, D] of query, key, value, edges and window."""
    from torch._inductor.codecache import CppCodeCache

    library: Any = CppCodeCache.load(Path(__file__).with_suffix(".cpp").read_text())

    class Native(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, query: Tensor, key: Tensor, value: Tensor, edges: tuple[int, ...], window: int | None
        ) -> Tensor:
            (tokens, heads, width), (_, kv_heads, value_width) = query.shape, value.shape
            ends = torch.tensor(edges)
            numbers = (heads, kv_heads, width, value_width, window or tokens, len(edges) - 1, ends.data_ptr())
            layer, out = Layer(*numbers, width**-0.5), query.new_empty(tokens, heads, value_width)
            log_sums = torch.empty(heads, tokens)
            library.attend(ctypes.byref(layer), *map(address, (query, key, value, out, log_sums)))
            ctx.save_for_backward(query, key, value, out, log_sums, ends)
            ctx.layer = layer
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            query, key, value, out, log_sums, _ = ctx.saved_tensors
            results = [torch.empty_like(x) for x in (query, key, value)]
            tensors = (query, key, value, out, log_sums, gradients[0].contiguous(), *results)
            library.differentiate(ctypes.byref(ctx.layer), *map(address, tensors))
            return *results, None, None

    return Native.apply


def address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def measure(case: str, rounds: int, kernel: Callable[..., Tensor], barrier: Callable[[], None]) -> Row:
    from aliquot.nn.attention.document_attention import Documents, Scoring, causal
    from aliquot.nn.attention.tiled_attention import TiledAttention

    shape, documents, *windows = case.split(":")
    heads, width = shape.split("x")
    query_heads, kv_heads = map(int, heads.split("/"))
    edges = (0, *accumulate(lengths_of(documents)))
    window = int(windows[0][1:]) if windows else None
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn(edges[-1], count, int(width), generator=generator).bfloat16()

    inputs, gradient = [draw(count).requires_grad_() for count in (query_heads, kv_heads, kv_heads)], draw(query_heads)
    scoring, backend = Scoring(int(width) ** -0.5, window), TiledAttention()
    row = Documents(edges, backend)

    def by_tiles(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return backend.attend(q, k, v, row, scoring)[0]

    def by_kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(query, key, value, edges, window)

    def by_document(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        parts = [causal(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], scoring) for a, b in pairwise(edges)]
        return torch.cat(parts, 2)[0].transpose(0, 1)

    def results(way: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = way(*given)
        return [out, *torch.autograd.grad(out, given, gradient.to(dtype))]

    found: Row = {"case": case, "tiles_error": None, "native_error": None}
    if edges[-1] <= MOST_CHECKED:
        exact = results(by_document, torch.float32)
        for name, way in (("tiles_error", by_tiles), ("native_error", by_kernel)):
            pairs = zip(results(way), exact, strict=True)
            found[name] = max(float((ours.float() - theirs).norm() / theirs.norm()) for ours, theirs in pairs)
    seconds: dict[str, list[float]] = {"tiles": [], "native": []}
    for _ in range(rounds + 1):
        for name, way in (("tiles", by_tiles), ("native", by_kernel)):
            barrier()
            began = time.thread_time()
            torch.autograd.grad(way(*inputs), inputs, gradient)
            seconds[name].append(time.thread_time() - began)
    took = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    milliseconds = {f"{name}_ms": 1e3 * number for name, number in took.items()}
    return found | milliseconds | {"speedup": took["tiles"] / took["native"]}


def rank() -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    dist.init_process_group("gloo")
    kernel = native()
    tell({"rows": [measure(case, int(sys.argv[3]), kernel, dist.barrier) for case in sys.argv[2].split(",")]})
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()
