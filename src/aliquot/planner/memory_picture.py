"""Memory over the phases of a run as a stacked picture, in SVG."""

from __future__ import annotations

from html import escape

from aliquot.planner.plan import Plan

_COLOURS = {
    "process": "#9aa0a6",
    "data": "#bdc1c6",
    "weights": "#1a73e8",
    "gradients": "#e8710a",
    "moments": "#9334e6",
    "gathered": "#12b5cb",
    "activations": "#1e8e3e",
    "loss": "#f9ab00",
    "buffers": "#d93025",
    "snapshot": "#e52592",
    "allocator": "#dadce0",
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 900, 480, 70, 40, 60, 150


def svg(plan: Plan) -> str:
    """A bar a phase: what a rank holds, its share of what the host shares hatched; the limit as a line."""
    limit = plan.limit_bytes
    top = 1.08 * max(limit if limit < 3 * plan.peak_bytes_per_rank else 0, plan.peak_bytes_per_rank)
    height, width = _HEIGHT - _TOP - _BOTTOM, _WIDTH - _LEFT - _RIGHT
    step = width / len(plan.phases)

    def y(size: float) -> float:
        return _TOP + height * (1 - size / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        '<defs><pattern id="shared" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="white" stroke-width="2"/></pattern></defs>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(_title(plan))}</text>',
    ]
    for tick in _ticks(top):
        at = y(tick)
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_LEFT + width}" y2="{at:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick / 2**30:g} GiB</text>')
    seen: list[str] = []
    for number, phase in enumerate(plan.phases):
        x, base = _LEFT + number * step + 0.12 * step, 0.0
        private = [(name, float(size), False) for name, size in phase.private_bytes.items()]
        shared = [(name, size / plan.ranks_per_node, True) for name, size in phase.shared_bytes.items()]
        for name, size, is_shared in [*private, *shared]:
            if size <= 0:
                continue
            box = f'x="{x:.1f}" y="{y(base + size):.1f}" width="{0.76 * step:.1f}" height="{height * size / top:.2f}"'
            what = f"{name}{', shared' if is_shared else ''}: {size / 2**20:,.0f} MiB"
            parts.append(f'<rect {box} fill="{_COLOURS.get(name, "#777")}"><title>{escape(what)}</title></rect>')
            if is_shared:
                parts.append(f'<rect {box} fill="url(#shared)" pointer-events="none"/>')
            base += size
            if name not in seen:
                seen.append(name)
        middle = x + 0.38 * step
        for line, word in enumerate(phase.name.split(" ")):
            parts.append(
                f'<text x="{middle:.1f}" y="{_HEIGHT - _BOTTOM + 18 + 14 * line}" text-anchor="middle">{word}</text>'
            )
    if limit <= top:
        at = y(limit)
        parts.append(
            f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_LEFT + width}" y2="{at:.1f}" stroke="#d93025"'
            ' stroke-dasharray="6"/>'
            f'<text x="{_LEFT + width + 6}" y="{at + 4:.1f}" fill="#d93025">limit {limit / 2**30:.1f} GiB</text>'
        )
    for number, name in enumerate(reversed(seen)):
        at = _TOP + 60 + 18 * number
        parts.append(
            f'<rect x="{_LEFT + width + 8}" y="{at - 10}" width="12" height="12" fill="{_COLOURS.get(name, "#777")}"/>'
            f'<text x="{_LEFT + width + 26}" y="{at}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(plan: Plan) -> str:
    where = plan.instance or "this kind of machine"
    return (
        f"{plan.model}, {plan.size}, engine {plan.engine}:"
        f" a rank of {plan.nodes} x {plan.ranks_per_node} on {where} (hatched: its share of shared memory)"
    )


def _ticks(top: float) -> list[float]:
    unit = float(2**30)
    while top / unit > 8:
        unit *= 2
    while top / unit < 3:
        unit /= 2
    return [unit * number for number in range(int(top / unit) + 1)]
