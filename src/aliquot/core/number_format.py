"""Format numbers for readers of logs, tables, and plots of the report."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_DIGEST = re.compile(r"[0-9a-f]{64}")


def short_hash(value: object) -> object:
    """Return the first 8 digits of a SHA-256 in hexadecimal, and any other value unchanged."""
    return value[:8] if isinstance(value, str) and _DIGEST.fullmatch(value) else value


def count_of(number: float | str, singular: str, plural: str | None = None) -> str:
    """Format a number with its noun: `1 step`, `2,000 steps`; `number` may be text that is already formatted."""
    text = number if isinstance(number, str) else f"{number:,.0f}"
    return f"{text} {singular if text == '1' else plural or f'{singular}s'}"


def gib(size_bytes: float) -> str:
    """Format as `1.25 GiB`."""
    return f"{size_bytes / 2**30:.2f} GiB"


def rate(per_second: float, unit: str) -> str:
    """Format with three digits and a decimal prefix: `1.23 TFLOP/s`."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(per_second) >= 0.9995 * size:  # numbers that round up to the prefix
            return f"{short(per_second / size)} {prefix}{unit}"
    return f"{per_second:.3g} {unit}"


def short(number: float) -> str:
    """Format with three digits, or all digits before the point."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Format as `42 s`, `3 min 07 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def compact(value: float) -> str:
    """Format as `950`, `4.1k` or `12M`."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"


def first_few(words: Sequence[str], most: int = 3) -> str:
    """Join the first of some words, and say how many there are besides."""
    more = f", and {len(words) - most} more" if len(words) > most else ""
    return "; ".join(words[:most]) + more


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def seconds(value: float) -> str:
    """Format as `1.24 s` or `35 ms`."""
    if value >= 1 or value == 0:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.0f} µs"


def byte_size(size: float) -> str:
    return rate(size, "B")


def dollars(amount: float) -> str:
    """Format an amount of money: `7,728`, `18.32`, `0.0034`."""
    if amount >= 1000:
        return f"{amount:,.0f}"
    decimals = 2 if amount == 0 else max(2, 1 - math.floor(math.log10(amount)))
    return f"{amount:.{decimals}f}"
