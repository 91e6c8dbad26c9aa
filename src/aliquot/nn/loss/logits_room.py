"""How many bytes of logits the head loss keeps at once, where they are more they are computed twice, and of how many
rows they are. No torch."""

from __future__ import annotations

HOST_BYTES = 256 << 20
ROW_COUNTS = 8  # different ones, of micro-batches that have as many tokens
_PART_OF_GPU = 16  # 8,192 tokens of a vocabulary of 128,256 in bf16 are 2 GiB, an H100's part is 5


def logits_room(gpu_memory_bytes: int | None) -> int:
    """`gpu_memory_bytes`: of the device; None: it is a CPU."""
    return HOST_BYTES if gpu_memory_bytes is None else max(HOST_BYTES, gpu_memory_bytes // _PART_OF_GPU)
