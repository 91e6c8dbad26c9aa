"""How much of a file is in memory while it is read or written, told without torch."""

DEPTH = 6  # pieces under way: two more than threads, so that none waits while the calling thread converts
PIECE_BYTES = 4 << 20  # of a file; DEPTH buffers of this size are all the memory that a pipeline has
MEMORY_BYTES = (DEPTH + 4) * PIECE_BYTES  # the buffers of a pipeline, and a piece of bytes as fp32
