"""Amounts of US dollars for people: large ones whole, small ones as far as they say something."""

from __future__ import annotations

import math

_WHOLE = 1000.0


def dollars(amount: float) -> str:
    """`7,728`, `18.32`, `0.0034`."""
    if amount >= _WHOLE:
        return f"{amount:,.0f}"
    decimals = 2 if amount == 0 else max(2, 1 - math.floor(math.log10(amount)))
    return f"{amount:.{decimals}f}"
