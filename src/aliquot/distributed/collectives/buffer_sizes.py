"""Sizes of buffers that ranks exchange; without torch, because the planner computes with them."""

PATCH_BLOCK = 1 << 18  # weights per block of a patch: 512 KiB, so that forty numpy calls per block are negligible
PATCH_CODE_BYTES = 1 / 4  # bytes of code per weight of a changed block (weight_patch.py)
_CACHE_LINE_BYTES = 64  # tensors of two ranks never share a cache line


def align(size_bytes: int) -> int:
    """Round a size up to whole cache lines."""
    return -(-size_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
