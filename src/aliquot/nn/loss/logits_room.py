"""The most bytes of logits that the head loss keeps at once, and its numbers of rows. Without torch."""

from __future__ import annotations

HOST_BYTES = 256 << 20
ROW_COUNTS = 8  # different numbers of rows for micro-batches of one size
_PART_OF_GPU = 16  # 5 GiB on an H100; 8,192 tokens of a vocabulary of 128,256 in bf16 need 2 GiB


def logits_room(gpu_memory_bytes: int | None) -> int:
    """Return the most bytes of logits at once. `gpu_memory_bytes`: memory of the GPU; None: a CPU."""
    return HOST_BYTES if gpu_memory_bytes is None else max(HOST_BYTES, gpu_memory_bytes // _PART_OF_GPU)
