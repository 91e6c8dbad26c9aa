"""Sizes of the buffers between files and tensors. Without torch, because the planner counts these buffers, too."""

DEPTH = 6  # pieces under way: two more than threads, so that none waits while the calling thread converts
PIECE_BYTES = 4 << 20  # of a file; DEPTH buffers of this size are all the memory that a pipeline has
MEMORY_BYTES = (DEPTH + 4) * PIECE_BYTES  # the buffers of a pipeline, and a piece of bytes as fp32
