"""Series of a run's numbers that figures, tiles and tables share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from aliquot.observe.events import ENDS
from aliquot.observe.report.read_run import Object, Points, Run, number
from aliquot.observe.report.svg import Frame, Layer, Mark, thinned
from aliquot.observe.step_clock import PARTS

NO_STEP = "no step has been logged yet"


def steady(run: Run, key: str) -> Points:
    """Return the points of `key` without the first step of each attempt, unless there are no others."""
    points = run.points(key)
    return [point for point in points if point[0] not in run.first_steps] or points


def average(run: Run, key: str) -> tuple[float, str] | None:
    """Return the mean of `tokens_per_s` or `mfu` and its basis: the final event, or the median of logged steps."""
    last = run.events[-1] if run.events else {}
    overall = number(last.get(key)) if last.get("event") in ENDS else None
    if overall is not None:
        return overall, "over all steps since the last start but the first"
    logged = steady(run, key)
    return (median(logged), "median of the logged steps") if logged else None


def timed(run: Run) -> list[Object]:
    """Return the logged steps with times of parts, without the first of each attempt unless there are no others."""
    lines = [line for line in run.steps if number(line.get("forward_s")) is not None]
    return [line for line in lines if number(line.get("step")) not in run.first_steps] or lines


def mean_parts(run: Run) -> dict[str, float]:
    """Return the mean seconds of each part over the steps of `timed`; 0 if there are none."""
    counted = {id(line) for line in timed(run)}
    weights: list[tuple[float, Object]] = []
    before = 0.0
    for line in run.steps:
        step = number(line.get("step")) or 0.0
        if id(line) in counted:
            weights.append((max(1.0, step - before), line))  # a line represents the steps since the previous line
        before = step
    steps = sum(weight for weight, _ in weights) or 1.0
    return {
        part: sum(weight * (number(line.get(f"{part}_s")) or 0.0) for weight, line in weights) / steps for part in PARTS
    }


def per_step(run: Run, key: str) -> Points:
    """Return the increase per step of a counter that starts at zero in each attempt."""
    increases = []
    for (before, low), (step, high) in pairwise(run.points(key)):
        if step > before and high >= low and step not in run.first_steps:
            increases.append((step, (high - low) / (step - before)))
    return increases


def ceiling_of(run: Run) -> float | None:
    """Return the newest matmul ceiling of all ranks, in FLOP/s."""
    for line in reversed(run.steps):
        flops, mfu = number(line.get("flops_per_s")), number(line.get("mfu"))
        if flops and mfu:
            return flops / mfu
    return number(run.about.get("ceiling_flops_per_s")) or None


def smoothed(points: Points) -> Points:
    """Return moving means over a thirtieth of all points, over fewer points at both ends."""
    reach = max(1, len(points) // 60)
    sums = [0.0, *accumulate(value for _, value in points)]
    means = []
    for i, (step, _) in enumerate(points):
        near = min(reach, i, len(points) - 1 - i)  # symmetric, so that a slope does not move
        means.append((step, (sums[i + near + 1] - sums[i - near]) / (2 * near + 1)))
    return means


def median(points: Points) -> float:
    values = sorted(value for _, value in points)
    return values[len(values) // 2]


def resumes(run: Run, xs: Sequence[float] = ()) -> list[Mark]:
    """Return marks at the resumes within the range of a figure."""
    shown = list(xs) or [step for step, _ in run.points("loss")]
    inside = [step for step in run.beginnings if shown and step > 0 and shown[0] <= step <= shown[-1]]
    return [Mark(step, f"resumed at {step:,.0f}") for step in inside]


def without_steps(run: Run) -> str:
    return f"{NO_STEP} ({run.status.word}: {run.status.detail})"


def hints_of(points: Points, text: Callable[[float, float], str]) -> list[tuple[float, str]]:
    selected = thinned(points, 200)
    frame = Frame((points[0][0], points[-1][0]), (0, 1))
    return [(frame.x(step), text(step, value)) for step, value in selected]


def hints_of_layers(
    xs: Sequence[float], layers: Sequence[Layer], heads: Sequence[str], words: Callable[[float], str]
) -> list[tuple[float, str]]:
    """Return for each x its head and the value of every layer, the uppermost layer first."""
    frame = Frame((xs[0], xs[-1]), (0, 1))
    return [
        (frame.x(x), "\n".join([head, *(f"{name} {words(values[i])}" for name, values, _ in reversed(layers))]))
        for i, (x, head) in enumerate(zip(xs, heads, strict=True))
    ]
