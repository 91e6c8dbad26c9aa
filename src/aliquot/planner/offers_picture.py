"""Offers as points of time and money, in SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from aliquot.catalogue.instances import dollars
from aliquot.planner.offers import Offer

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 900, 520, 70, 40, 50, 40
_COLOURS = {"on-demand": "#1a73e8", "spot": "#e8710a"}


def svg(offers: Sequence[Offer], title: str) -> str:
    """Hours to the right, US dollars up, both in powers; those that nothing beats in both are named."""
    across = _scale([each.total_s / 3600 for each in offers], _LEFT, _WIDTH - _RIGHT)
    up = _scale([each.usd for each in offers], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 10}" text-anchor="end">hours</text>',
        f'<text x="12" y="{_TOP}">USD</text>',
    ]
    for tick in _ticks([each.total_s / 3600 for each in offers]):
        parts.append(f'<line x1="{across(tick):.1f}" y1="{_TOP}" x2="{across(tick):.1f}" y2="{_HEIGHT - _BOTTOM}"'
                     f' stroke="#eee"/><text x="{across(tick):.1f}" y="{_HEIGHT - 30}" text-anchor="middle">{tick:g}'
                     "</text>")  # fmt: skip
    for tick in _ticks([each.usd for each in offers]):
        parts.append(f'<line x1="{_LEFT}" y1="{up(tick):.1f}" x2="{_WIDTH - _RIGHT}" y2="{up(tick):.1f}"'
                     f' stroke="#eee"/>'
                     f'<text x="{_LEFT - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>')  # fmt: skip
    for each in offers:
        at = f'cx="{across(each.total_s / 3600):.1f}" cy="{up(each.usd):.1f}" r="4"'
        name = f"{each.plan.nodes} x {each.plan.instance}, {each.capacity}"
        told = f"{name}: {each.total_s / 3600:,.1f} h, {dollars(each.usd)} USD"
        parts.append(f'<circle {at} fill="{_COLOURS[each.capacity]}"><title>{escape(told)}</title></circle>')
    for each in unbeaten(offers):
        name = f"{each.plan.nodes} x {each.plan.instance}"
        parts.append(
            f'<text x="{across(each.total_s / 3600) + 6:.1f}" y="{up(each.usd) - 4:.1f}">{escape(name)}</text>'
        )
    for number, (name, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<text x="{_WIDTH - _RIGHT - 90}" y="{_TOP + 16 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def unbeaten(offers: Sequence[Offer]) -> list[Offer]:
    """Those than which none is both faster and cheaper, the fastest first."""
    found: list[Offer] = []
    for each in sorted(offers, key=lambda offer: (offer.total_s, offer.usd)):
        if not found or each.usd < found[-1].usd:
            found.append(each)
    return found


def _scale(values: Sequence[float], start: float, stop: float) -> Callable[[float], float]:
    low, high = math.log(min(values) * 0.8), math.log(max(values) * 1.25)
    return lambda value: start + (math.log(value) - low) / (high - low) * (stop - start)


def _ticks(values: Sequence[float]) -> list[float]:
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    every = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [each for each in every if min(values) * 0.8 <= each <= max(values) * 1.25]
