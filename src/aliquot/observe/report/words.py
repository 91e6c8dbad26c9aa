"""Numbers of the report, short enough for an axis."""

from __future__ import annotations

from aliquot.observe.readable import rate


def compact(value: float) -> str:
    """`950`, `4.1k`, `12M`."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"


def significant(value: float) -> str:
    """Three digits, thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def seconds(value: float) -> str:
    """`1.24 s`, `35 ms`."""
    if value >= 1 or value == 0:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.0f} µs"


def in_bytes(size: float) -> str:
    return rate(size, "B")
