"""Identify the present boot of this machine."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Return the id that the kernel draws at each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
