"""What runs on a GPU beneath a run: its attention, its loss, loading and saving; and nothing that waits unasked."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.gpu_contestants import CONTESTANTS, FLASH_MODULES
from safetensors.torch import load_file
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from aliquot.checkpoint.live_parts import copier_for
from aliquot.machine.memory import Gpu
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.attention import cuda_attention
from aliquot.nn.attention.cuda_attention import CudaAttention
from aliquot.nn.attention.document_attention import Documents, ReferenceAttention, Scoring
from aliquot.nn.head_loss import choose, head_loss_on
from aliquot.nn.preference_loss import Answers, Objective
from aliquot.observe.step_clock import HostMark, cuda_mark
from tests.gpu.on_device import DEVICE, LLAMA, needs_device, needs_gpu

pytestmark = needs_device


def batch(length: int = 96) -> MicroBatch:
    ids = torch.randint(0, 512, (length,))
    labels = ids.roll(-1)
    labels[::7] = -100
    return MicroBatch(ids, labels, torch.arange(length), (0, length))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["varlen", "flex"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_attention_is_the_reference(dtype: torch.dtype, window: int | None, key_heads: int) -> None:
    compare_with_reference(dtype, window, key_heads)


@needs_gpu
@pytest.mark.parametrize("kernel", FLASH_MODULES)
@pytest.mark.parametrize("window", [None, 1, 100])
def test_attention_of_flash_attention_3_and_4_is_the_reference(kernel: str, window: int | None) -> None:
    if f"aliquot, {kernel}" not in CONTESTANTS:
        pytest.skip(f"{kernel} is not installed")
    activate_flash_attention_impl(kernel)
    try:
        compare_with_reference(torch.bfloat16, window, key_heads=2)
    finally:
        restore_flash_attention_impl()


def compare_with_reference(dtype: torch.dtype, window: int | None, key_heads: int) -> None:
    edges = (0, 1, 2, 65, 130, 700, 1024)
    query = torch.randn(1, 8, 1024, 64, device="cuda", dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, key_heads, 1024, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in "kv")
    scoring, found = Scoring(0.125, window), []
    for backend in (ReferenceAttention(), CudaAttention()):
        out = backend.attend(query, key, value, Documents(edges, None).on(query.device), scoring)
        found.append([out, *torch.autograd.grad((out * torch.arange(64, device="cuda")).sum(), (query, key, value))])
    largest = max(float(expected.double().norm()) for expected in found[0])
    for expected, ours in zip(*found, strict=True):
        # With a window of one queries and keys change nothing: their gradients are 0, or rounding.
        error = (ours.double() - expected.double()).norm() / (float(expected.double().norm()) or largest)
        assert error < (2**-6 if dtype == torch.bfloat16 else 1e-4)


@needs_gpu
@pytest.mark.parametrize("width", [64, 256])
def test_soft_caps_and_sinks_are_the_reference(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Wide heads with the kernels for GPUs with little shared memory."""
    if width == 256:
        monkeypatch.setattr(cuda_attention, "kernel_options", lambda device: cuda_attention._SMALL_KERNELS)
    edges = (0, 1, 65, 300, 512)
    query, key, value = (torch.randn(1, 4, 512, width, device="cuda", requires_grad=True) for _ in "qkv")
    sinks, found = torch.randn(4, device="cuda", requires_grad=True), []
    for window, softcap in ((None, 3.0), (40, 3.0), (40, 5.0)):
        scoring = Scoring(1.0, window, softcap, sinks)
        for backend in (ReferenceAttention(), CudaAttention()):
            out = backend.attend(query, key, value, Documents(edges, None).on(query.device), scoring)
            found.append(
                [
                    out,
                    *torch.autograd.grad((out * torch.arange(width, device="cuda")).sum(), (query, key, value, sinks)),
                ]
            )
        for expected, ours in zip(*found[-2:], strict=True):
            assert (ours - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_waits_for_nothing(compiled: bool) -> None:
    fed = batch()
    there = fed.to(torch.device(DEVICE))
    hidden = torch.randn(96, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(512, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    loss = head_loss_on(DEVICE, compiled=compiled)
    loss(hidden, weight, there.labels, 1.0, chosen=there.chosen)[1].backward()  # what is compiled once is
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        summed, scaled = loss(hidden, weight, there.labels, 1.0, chosen=there.chosen)
        scaled.backward()
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    on_cpu = head_loss_on("cpu")(hidden.detach().cpu(), weight.detach().cpu(), fed.labels, 1.0)[0]
    assert float(summed) == pytest.approx(float(on_cpu), rel=1e-2)


def test_parts_are_copied_beside_the_kernels() -> None:
    values = torch.randn(1 << 20, device=DEVICE)
    copier = copier_for(DEVICE)()
    buffer = copier.buffer(values.numel())
    assert buffer.is_pinned() == (DEVICE == "cuda")
    with copier.copies():
        buffer.copy_(values)
    assert torch.equal(buffer, values.cpu())


def test_time_is_that_of_the_device() -> None:
    mark = cuda_mark if DEVICE == "cuda" else HostMark
    large = torch.randn(2048, 2048, device=DEVICE)
    first = mark()
    for _ in range(20):
        large @ large
    last = mark()
    last.synchronize()
    assert last.query() and 1e-2 < first.elapsed_time(last) < 60_000


@needs_gpu
def test_memory_is_what_tensors_take() -> None:
    before = Gpu().memory()
    held = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    after = Gpu().memory()
    assert after.allocated_bytes - before.allocated_bytes == held.nbytes
    assert after.reserved_bytes >= after.allocated_bytes and after.peak_bytes >= after.used_bytes
    assert after.beside_bytes > 100 << 20  # the context


@needs_gpu
def test_memory_is_expandable() -> None:
    code = (
        "import torch; from aliquot.machine.allocator import use_expandable_segments; torch.cuda.set_device(0);"
        "use_expandable_segments(); values = torch.empty(1 << 26, device='cuda');"
        "assert all(segment['is_expandable'] for segment in torch.cuda.memory_snapshot())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "not supported" not in done.stderr, done.stderr


@needs_gpu
def test_loads_to_the_device_through_bounded_pinned_memory(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoConfig, AutoModelForCausalLM

    from aliquot import load_sharded

    config = AutoConfig.for_model(**LLAMA, vocab_size=4096)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        loaded = load_sharded(config, tmp_path, init_device_mesh("cuda", (1,)), dtype=torch.bfloat16)
        stored = load_file(tmp_path / "model.safetensors")
        for name, weight in loaded.named_parameters():
            local = weight.to_local()
            assert local.device.type == "cuda"
            assert torch.equal(local.cpu(), stored[name].bfloat16()), name
    finally:
        torch.distributed.destroy_process_group()


def test_preferences_are_those_of_a_cpu() -> None:
    """Log-probabilities and gradients of two pairs of answers, also after the copy of a whole micro-batch."""
    objective = Objective("dpo", beta=0.5)
    reference = torch.tensor([[-150.0, -149.0], [-151.0, -148.0]])
    fed = batch()
    lengths = torch.stack([(fed.labels[start : start + 24] != -100).sum() for start in range(0, 96, 24)]).view(2, 2)
    tokens = (fed.labels != -100).nonzero().flatten()
    answers = Answers(tokens, objective, tokens // 24, lengths.float(), reference)
    fed = replace(fed, row_loss=answers)
    hidden, weight = torch.randn(96, 64), torch.randn(512, 64)
    results = []
    for device in ("cpu", DEVICE):
        there = fed.to(torch.device(device))
        leaf = hidden.to(device, copy=True).requires_grad_()
        chosen = there.chosen or choose(there.labels, there.row_loss)
        logprobs, scaled = head_loss_on(device)(leaf, weight.to(device), there.labels, 0.5, chosen=chosen)
        scaled.backward()
        assert leaf.grad is not None
        results.append((logprobs.cpu(), leaf.grad.cpu(), there.metrics(logprobs)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)
