"""How many examples a test of hypothesis tries: a quarter in `make test`, all in `make test-long`."""

from __future__ import annotations

from hypothesis import settings

FULL = 100  # hypothesis' own number

# deadline: how long an example takes is the machine's affair.
settings.register_profile("short", deadline=None, max_examples=FULL // 4)
settings.register_profile("full", deadline=None, max_examples=FULL)


def examples(full: int) -> int:
    """For a test that asks for another number than hypothesis' own, in the profile that is chosen."""
    return max(5, full * settings.default.max_examples // FULL)
