"""Where things begin that several processes write to."""

ALIGN_BYTES = 64  # a cache line: tensors of two ranks never share one


def aligned(size_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
