"""Numbers as a person reads them."""

from __future__ import annotations


def gib(size_bytes: float) -> str:
    """`1.25 GiB`."""
    return f"{size_bytes / 2**30:.2f} GiB"


def rate(per_second: float, unit: str) -> str:
    """`1.23 TFLOP/s` from FLOP/s and `FLOP/s`: three digits and a decimal prefix."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(per_second) >= 0.9995 * size:  # what is rounded to it
            return f"{short(per_second / size)} {prefix}{unit}"
    return f"{per_second:.3g} {unit}"


def short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """`42 s`, `3 min 07 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
