"""Sizes of what tells other hosts how weights have changed (weight_patch.py), for plans too: no torch."""

BLOCK = 1 << 18  # weights: so many that some forty calls of numpy hardly count, and half a MiB each to work on
CODE_BYTES = 1 / 4  # of each weight, in a block with one that has changed
