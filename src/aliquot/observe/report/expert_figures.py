"""Pictures of a mixture of experts: how evenly its layers use them, and what balancing them adds to the loss."""

from __future__ import annotations

from aliquot.observe.report.figure import Figure, Key, Table
from aliquot.observe.report.read_run import Object, Points, Run, number
from aliquot.observe.report.series import hints_of, resumes
from aliquot.observe.report.svg import Level, Line, line_chart
from aliquot.observe.report.words import compact, significant


def expert_figures(run: Run) -> list[Figure]:
    """None where no layer has experts."""
    told = [(number(line.get("step")), _loads(line)) for line in run.steps]
    loads = [(step, of_layers) for step, of_layers in told if step is not None and of_layers]
    return [_load(run, loads), *_balance(run)] if loads else []


def _load(run: Run, loads: list[tuple[float, list[float]]]) -> Figure:
    worst: Points = [(step, max(of_layers)) for step, of_layers in loads]
    mean: Points = [(step, sum(of_layers) / len(of_layers)) for step, of_layers in loads]
    last = loads[-1][1]
    unused = dict(run.points("unused_experts"))
    without = unused.get(worst[-1][0], 0)
    says = (
        f"At the end the busiest expert of a layer had {significant(mean[-1][1])} times the mean load, averaged over"
        f" {len(last)} layer{'s' if len(last) > 1 else ''}, at worst {significant(max(last))} times"
        f" (layer {last.index(max(last))}); {without:,.0f} experts got no token since the last line."
    )
    lines = [Line("the worst layer", worst, 1), Line("mean of the layers", mean, 0)]
    svg = line_chart(
        lines, significant, format_x=compact, from_zero=True, levels=[Level("even", 1.0)], marks=resumes(run)
    )
    rows = [
        [f"{step:,.0f}", significant(average), significant(peak), f"{unused[step]:,.0f}" if step in unused else ""]
        for (step, average), (_, peak) in zip(mean, worst, strict=True)
    ]
    return Figure(
        "expert-load", "Load of the busiest expert", says, svg, unit="times the mean load of its layer",
        keys=[Key("the worst layer", 1), Key("mean of the layers", 0)],
        table=Table(("step", "mean of the layers", "worst layer", "unused experts"), rows),
        hints=hints_of(worst, lambda step, value: f"step {step:,.0f}\nbusiest {significant(value)}x"),
    )  # fmt: skip


def _balance(run: Run) -> list[Figure]:
    points = run.points("router_loss")
    if not points:
        return []
    says = f"Balancing the routers added {significant(points[-1][1])} to the training loss at the end."
    return [
        Figure(
            "router-loss", "What balancing adds to the loss", says,
            line_chart([Line("balance", points, 0)], significant, format_x=compact, marks=resumes(run)),
            unit="nats per token", keys=[Key("router_aux_loss_coef x balance", 0)],
            table=Table(("step", "added"), [[f"{step:,.0f}", f"{value:.5f}"] for step, value in points]),
            hints=hints_of(points, lambda step, value: f"step {step:,.0f}\n{value:.5f}"),
        )
    ]  # fmt: skip


def _loads(line: Object) -> list[float]:
    told = line.get("busiest_expert")
    return [value for each in told if (value := number(each)) is not None] if isinstance(told, list) else []
