"""Draw the planner's SVG plots: memory of a rank over the phases of a run, and offers by time and price."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from aliquot.catalogue.instances import dollars
from aliquot.planner.offers import Offer
from aliquot.planner.plan import PhaseMemory, Plan

_LEFT, _TOP, _WIDTH = 70, 40, 900
_RED, _GRID = "#d93025", "#eee"

_CATEGORY_COLOURS = {
    "process": "#9aa0a6",
    "data": "#bdc1c6",
    "weights": "#1a73e8",
    "gradients": "#e8710a",
    "moments": "#9334e6",
    "gathered": "#12b5cb",
    "activations": "#1e8e3e",
    "loss": "#f9ab00",
    "buffers": _RED,
    "snapshot": "#e52592",
    "streamed": "#777",
    "allocator": "#dadce0",
}
_MEMORY_HEIGHT, _MEMORY_BOTTOM, _MEMORY_RIGHT = 480, 60, 150
_HATCHING = (
    '<defs><pattern id="shared" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="white" stroke-width="2"/></pattern></defs>'
)

_CAPACITY_COLOURS = {"on-demand": "#1a73e8", "spot": "#e8710a"}
_OFFERS_HEIGHT, _OFFERS_BOTTOM, _OFFERS_RIGHT = 520, 50, 40


def memory_svg(plan: Plan) -> str:
    """Draw the memory of a rank by category, as a bar for each phase, and its limit as a line.

    Hatched areas are the rank's share of memory that all ranks of a host share.
    """
    limit = plan.limit_bytes
    top = 1.08 * max(limit if limit < 3 * plan.peak_bytes_per_rank else 0, plan.peak_bytes_per_rank)
    height, right = _MEMORY_HEIGHT - _TOP - _MEMORY_BOTTOM, _WIDTH - _MEMORY_RIGHT
    step = (right - _LEFT) / len(plan.phases)

    def y(size: float) -> float:
        return _TOP + height * (1 - size / top)

    parts = []
    for tick in _memory_ticks(top):
        parts.append(_line(_LEFT, y(tick), right, y(tick), f'stroke="{_GRID}"'))
        parts.append(_text(_LEFT - 6, y(tick) + 4, f"{tick / 2**30:g} GiB", "end"))
    categories: list[str] = []
    for number, phase in enumerate(plan.phases):
        x, base = _LEFT + number * step + 0.12 * step, 0.0
        for name, size, is_shared in _sizes(phase, plan.ranks_per_node):
            box = f'x="{x:.1f}" y="{y(base + size):.1f}" width="{0.76 * step:.1f}" height="{height * size / top:.2f}"'
            label = escape(f"{name}{', shared' if is_shared else ''}: {size / 2**20:,.0f} MiB")
            parts.append(f'<rect {box} fill="{_CATEGORY_COLOURS[name]}"><title>{label}</title></rect>')
            if is_shared:
                parts.append(f'<rect {box} fill="url(#shared)" pointer-events="none"/>')
            base += size
            if name not in categories:
                categories.append(name)
        for line, word in enumerate(phase.name.split(" ")):
            below = _MEMORY_HEIGHT - _MEMORY_BOTTOM + 18 + 14 * line
            parts.append(_text(x + 0.38 * step, below, word, "middle"))
    if limit <= top:
        parts.append(_line(_LEFT, y(limit), right, y(limit), f'stroke="{_RED}" stroke-dasharray="6"'))
        parts.append(_text(right + 6, y(limit) + 4, f"limit {limit / 2**30:.1f} GiB", colour=_RED))
    for number, name in enumerate(reversed(categories)):
        at = _TOP + 60 + 18 * number
        parts.append(f'<rect x="{right + 8}" y="{at - 10}" width="12" height="12" fill="{_CATEGORY_COLOURS[name]}"/>')
        parts.append(_text(right + 26, at, name))
    where = plan.instance or "this kind of machine"
    title = (
        f"{plan.model}, {plan.size}, engine {plan.engine}:"
        f" a rank of {plan.nodes} x {plan.ranks_per_node} on {where} (hatched: its share of shared memory)"
    )
    return _svg(_MEMORY_HEIGHT, title, [_HATCHING, *parts])


def offers_svg(offers: Sequence[Offer], title: str) -> str:
    """Draw each offer as a point, with hours as x and US dollars as y on logarithmic axes.

    Pareto-optimal offers carry their names.
    """
    hours, prices = [offer.total_s / 3600 for offer in offers], [offer.usd for offer in offers]
    right, bottom = _WIDTH - _OFFERS_RIGHT, _OFFERS_HEIGHT - _OFFERS_BOTTOM
    x, y = _log_scale(hours, _LEFT, right), _log_scale(prices, bottom, _TOP)
    parts = [_text(right, _OFFERS_HEIGHT - 10, "hours", "end"), _text(12, _TOP, "USD")]
    for tick in _log_ticks(hours):
        parts.append(_line(x(tick), _TOP, x(tick), bottom, f'stroke="{_GRID}"'))
        parts.append(_text(x(tick), _OFFERS_HEIGHT - 30, f"{tick:g}", "middle"))
    for tick in _log_ticks(prices):
        parts.append(_line(_LEFT, y(tick), right, y(tick), f'stroke="{_GRID}"'))
        parts.append(_text(_LEFT - 6, y(tick) + 4, f"{tick:,g}", "end"))
    for offer, hour in zip(offers, hours, strict=True):
        point = f'cx="{x(hour):.1f}" cy="{y(offer.usd):.1f}" r="4" fill="{_CAPACITY_COLOURS[offer.capacity]}"'
        label = f"{offer.plan.nodes} x {offer.plan.instance}, {offer.capacity}: {hour:,.1f} h, {dollars(offer.usd)} USD"
        parts.append(f"<circle {point}><title>{escape(label)}</title></circle>")
    for offer in pareto_optimal(offers):
        label = f"{offer.plan.nodes} x {offer.plan.instance}"
        parts.append(_text(x(offer.total_s / 3600) + 6, y(offer.usd) - 4, label))
    for number, (capacity, colour) in enumerate(_CAPACITY_COLOURS.items()):
        parts.append(_text(right - 90, _TOP + 16 * number, capacity, colour=colour))
    return _svg(_OFFERS_HEIGHT, title, parts)


def pareto_optimal(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers that no other offer beats in both time and money, the fastest first."""
    best: list[Offer] = []
    for offer in sorted(offers, key=lambda offer: (offer.total_s, offer.usd)):
        if not best or offer.usd < best[-1].usd:
            best.append(offer)
    return best


def _sizes(phase: PhaseMemory, ranks_per_node: int) -> list[tuple[str, float, bool]]:
    """Return (category, bytes, whether the ranks of a host share the bytes) of each category that is not empty."""
    private = [(name, float(size), False) for name, size in phase.private_bytes.items()]
    shared = [(name, size / ranks_per_node, True) for name, size in phase.shared_bytes.items()]
    return [(name, size, is_shared) for name, size, is_shared in [*private, *shared] if size > 0]


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {stroke}/>'


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def _memory_ticks(top: float) -> list[float]:
    unit = float(2**30)
    while top / unit > 8:
        unit *= 2
    while top / unit < 3:
        unit /= 2
    return [unit * number for number in range(int(top / unit) + 1)]


def _log_scale(values: Sequence[float], start: float, stop: float) -> Callable[[float], float]:
    low, high = math.log(min(values) * 0.8), math.log(max(values) * 1.25)
    return lambda value: start + (math.log(value) - low) / (high - low) * (stop - start)


def _log_ticks(values: Sequence[float]) -> list[float]:
    exponents = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    return [tick for tick in ticks if min(values) * 0.8 <= tick <= max(values) * 1.25]
