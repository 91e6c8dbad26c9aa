"""Draw the planner's SVG plots: memory of a rank over the phases of a run, and offers by time and price."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from aliquot.core.number_format import dollars, gib, short
from aliquot.observe.report.charts import WIDTH, Figure, Layer, log_ticks
from aliquot.planner.offers import Offer
from aliquot.planner.plan import Plan
from aliquot.planner.report import memory_columns

_LEFT, _TOP, _WIDTH = 70, 40, 900
_GRID = "#eee"
_CAPACITY_COLOURS = {"on-demand": "#1a73e8", "spot": "#e8710a"}
_OFFERS_HEIGHT, _OFFERS_BOTTOM, _OFFERS_RIGHT = 520, 50, 40
_LEGEND_STEP = 105
_COLOURS = ("#0067a5", "#c8500a", "#00856a", "#b65a93", "#3f9bd3", "#a87a00", "#5b4ea3")  # c0 to c6 of the report
_STYLE = (
    "text { font-size: 12px } .tick { fill: #59616b } .grid { stroke: #e9eae7 } .area { stroke: white }"
    " .level { stroke: #a8321f; stroke-width: 1.8; stroke-dasharray: 9 4 } "
) + " ".join(f".c{i} {{ fill: {colour} }}" for i, colour in enumerate(_COLOURS))


def memory_svg(plan: Plan) -> str:
    """Draw the memory of a rank by category, as a bar for each phase, and its limit as a line.

    The last category is the rank's share of memory that all ranks of a host share.
    """
    columns, limit = memory_columns(plan, plan.phases), plan.limit_bytes
    layers = [Layer(name, [size / 2**30 for size in sizes], i) for i, (name, sizes) in enumerate(columns.items())]
    where = f"{plan.nodes} x {plan.ranks_per_node} on {plan.instance or 'this kind of machine'}"
    figure = Figure(
        "memory", f"{plan.model}, {plan.size}, engine {plan.engine}: a rank of {where}", "", "", "GiB", short,
        short, bars=[phase.name for phase in plan.phases], layers=layers,
        levels={f"limit {gib(limit)}": limit / 2**30} if limit < 3 * plan.peak_bytes_per_rank else {},
    )  # fmt: skip
    legend = [
        f'<rect class="c{layer.colour}" x="{8 + _LEGEND_STEP * i}" y="36" width="10" height="10"/>'
        f'<text x="{22 + _LEGEND_STEP * i}" y="45">{layer.name}</text>'
        for i, layer in enumerate(figure.layers)
    ]
    parts = [f"<style>{_STYLE}</style>", *legend, f'<g transform="translate(0 50) scale({_WIDTH / WIDTH})">']
    return _svg(int(50 + figure.height * _WIDTH / WIDTH), figure.title, [*parts, figure.svg, "</g>"])


def offers_svg(offers: Sequence[Offer], title: str) -> str:
    """Draw each offer as a point, with hours as x and US dollars as y on logarithmic axes.

    Pareto-optimal offers carry their names.
    """
    hours, prices = [offer.total_s / 3600 for offer in offers], [offer.usd for offer in offers]
    right, bottom = _WIDTH - _OFFERS_RIGHT, _OFFERS_HEIGHT - _OFFERS_BOTTOM
    x, y = _log_scale(hours, _LEFT, right), _log_scale(prices, bottom, _TOP)
    x_ticks, y_ticks = (log_ticks(0.8 * min(values), 1.25 * max(values)) for values in (hours, prices))
    grid = f'stroke="{_GRID}"'

    def point(offer: Offer) -> str:
        hour = offer.total_s / 3600
        label = f"{offer.plan.nodes} x {offer.plan.instance}, {offer.capacity}: {hour:,.1f} h, {dollars(offer.usd)} USD"
        place = f'cx="{x(hour):.1f}" cy="{y(offer.usd):.1f}" r="4" fill="{_CAPACITY_COLOURS[offer.capacity]}"'
        return f"<circle {place}><title>{escape(label)}</title></circle>"

    parts = [
        _text(right, _OFFERS_HEIGHT - 10, "hours", "end"),
        _text(12, _TOP, "USD"),
        *(_line(x(tick), _TOP, x(tick), bottom, grid) for tick in x_ticks),
        *(_text(x(tick), _OFFERS_HEIGHT - 30, f"{tick:g}", "middle") for tick in x_ticks),
        *(_line(_LEFT, y(tick), right, y(tick), grid) for tick in y_ticks),
        *(_text(_LEFT - 6, y(tick) + 4, f"{tick:,g}", "end") for tick in y_ticks),
        *map(point, offers),
        *(
            _text(x(offer.total_s / 3600) + 6, y(offer.usd) - 4, f"{offer.plan.nodes} x {offer.plan.instance}")
            for offer in pareto_optimal(offers)
        ),
        *(
            _text(right - 90, _TOP + 16 * number, capacity, colour=colour)
            for number, (capacity, colour) in enumerate(_CAPACITY_COLOURS.items())
        ),
    ]
    return _svg(_OFFERS_HEIGHT, title, parts)


def pareto_optimal(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers that no other offer beats in both time and money, the fastest first."""
    best: list[Offer] = []
    for offer in sorted(offers, key=lambda offer: (offer.total_s, offer.usd)):
        if not best or offer.usd < best[-1].usd:
            best.append(offer)
    return best


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


def _log_scale(values: Sequence[float], start: float, stop: float) -> Callable[[float], float]:
    low, high = math.log(min(values) * 0.8), math.log(max(values) * 1.25)
    return lambda value: start + (math.log(value) - low) / (high - low) * (stop - start)
