"""The figures of one run, except for memory: learning, speed, parts of a step, traffic, sources and experts."""

from __future__ import annotations

from aliquot.observe.number_format import byte_size, compact, percent, rate, seconds, significant
from aliquot.observe.report.figure import Axis, Figure, Key, Table, labelled_lines
from aliquot.observe.report.read_run import Object, Points, Run, evaluation_sets, number
from aliquot.observe.report.series import (
    hints_of,
    hints_of_layers,
    mean_parts,
    median,
    per_step,
    resumes,
    smoothed,
    steady,
    timed,
    without_steps,
)
from aliquot.observe.report.svg import Level, Line, Overlay, area_chart, line_chart
from aliquot.observe.step_clock import PARTS

_MAX_STRETCHES = 60  # a stacked area shows the means of at most so many stretches of steps
_MIN_SMOOTHED = 60  # logged steps: fewer need no smoothing


def loss(run: Run) -> Figure:
    name, title = "loss", "Loss"
    trained, evaluated = run.points("loss"), run.points("eval_loss", run.evaluations)
    if not trained:
        return Figure(name, title, "", missing=without_steps(run))
    smooth = len(trained) >= _MIN_SMOOTHED
    lines = [Line("training", trained, 0, "faint" if smooth else "")]
    keys = [Key("training", 0)]
    if smooth:
        lines.append(Line("training, smoothed", smoothed(trained), 0))
        keys = [Key("training, smoothed (thin: as logged)", 0)]
    if evaluated:
        lines.append(Line("evaluation", evaluated, 1, "dots dashed"))
        keys.append(Key("evaluation", 1, "dots"))
    marks = resumes(run)
    says = f"Training loss went from {trained[0][1]:.4f} to {trained[-1][1]:.4f} over {compact(trained[-1][0])} steps"
    says += f"; evaluation loss ended at {evaluated[-1][1]:.4f}." if evaluated else "; nothing was evaluated."
    if times := sum(event.get("event") == "resume" for event in run.attempts):
        says += f" The run was resumed {times} time{'s' if times > 1 else ''}."
    curves = dict(trained), dict(evaluated)
    steps = sorted({step for step, _ in (*trained, *evaluated)})  # an evaluated step need not be a logged one
    rows = [[f"{step:,.0f}", *(f"{at[step]:.4f}" if step in at else "" for at in curves)] for step in steps]
    svg = line_chart(lines, lambda v: f"{v:.3g}", format_x=compact, marks=marks)
    return Figure(
        name, title, says, svg, unit="nats per token", keys=keys, table=Table(("step", "training", "evaluation"), rows),
        hints=hints_of(trained, lambda step, value: f"step {step:,.0f}\nloss {value:.4f}"),
    )  # fmt: skip


def perplexity(run: Run) -> Figure:
    name, title = "perplexity", "Perplexity on held-out text"
    points = run.points("eval_perplexity", run.evaluations)
    if not points:
        configured = any(
            run.setting("data", key) for key in ("eval_path", "eval_split", "eval_fraction", "eval_sources")
        )
        why = (
            "no evaluation was made yet: set train.eval_steps for more than the one at the end"
            if configured
            else "there is no evaluation text: set data.eval_fraction, eval_path or eval_split"
        )
        return Figure(name, title, "", missing=why)
    best = min(points, key=lambda point: point[1])
    bits = dict(run.points("eval_bits_per_byte", run.evaluations))
    rows = [[f"{step:,.0f}", f"{value:,.2f}", f"{bits[step]:.3f}" if step in bits else ""] for step, value in points]
    svg = line_chart([Line("perplexity", points, 1, "dots")], significant, format_x=compact, marks=resumes(run))
    return Figure(
        name, title,
        f"{len(points)} evaluation{'s' if len(points) > 1 else ''}; the last gave {significant(points[-1][1])},"
        f" the best {significant(best[1])} at step {best[0]:,.0f}.",
        svg, unit="perplexity per predicted token", keys=[Key("perplexity", 1, "dots")],
        table=Table(("step", "perplexity", "bits per byte"), rows),
        hints=hints_of(points, lambda step, value: f"step {step:,.0f}\nperplexity {significant(value)}"),
    )  # fmt: skip


def speed(run: Run) -> Figure:
    name, title = "tokens", "Real tokens per second"
    points = steady(run, "tokens_per_s")
    if not points:
        return Figure(name, title, "", missing=without_steps(run))
    svg = line_chart([Line("tokens/s", points, 0)], compact, format_x=compact, from_zero=True, marks=resumes(run))
    return Figure(
        name, title,
        f"{compact(median(points))} real tokens a second in the middle of the run; padding is not counted, nor is the"
        " first step of each attempt.",
        svg, unit="real tokens/s over all ranks", keys=[Key("mean of the last ten steps", 0)],
        table=Table(("step", "tokens/s"), [[f"{step:,.0f}", f"{value:,.0f}"] for step, value in points]),
        hints=hints_of(points, lambda step, value: f"step {step:,.0f}\n{value:,.0f} tokens/s"),
    )  # fmt: skip


def utilisation(run: Run) -> Figure:
    name, title = "mfu", "Model FLOP/s against the matmul ceiling"
    points = steady(run, "flops_per_s")
    if not points:
        return Figure(name, title, "", missing=without_steps(run))
    shares = dict(run.points("mfu"))
    # Every attempt measures the ceiling, perhaps on another machine.
    ceiling = [(step, value / shares[step]) for step, value in points if shares.get(step, 0) > 0]
    lines, keys = [Line("model FLOP/s", points, 2)], [Key("model FLOP/s", 2)]
    says = f"The model needed {rate(median(points), 'FLOP/s')}"
    if ceiling:
        lines.append(Line("plain matmul", ceiling, 1, "dashed"))
        keys.append(Key("what a plain matmul reached here", 1, "dashed", rate(ceiling[-1][1], "FLOP/s")))
        says += f", {percent(median(steady(run, 'mfu')))} of what a plain matmul reached on the same cores"
    else:
        says += "; the matmul ceiling was not measured"
    svg = line_chart(lines, lambda v: rate(v, ""), format_x=compact, from_zero=True, marks=resumes(run))
    rows = [
        [f"{step:,.0f}", rate(value, "FLOP/s"), percent(shares[step]) if step in shares else "unknown"]
        for step, value in points
    ]
    return Figure(
        name, title, f"{says}. Recomputation is not counted.", svg, unit="FLOP/s over all ranks", keys=keys,
        table=Table(("step", "model FLOP/s", "MFU"), rows),
        hints=hints_of(points, lambda step, value: f"step {step:,.0f}\n{rate(value, 'FLOP/s')}"
                     + (f"\nMFU {percent(shares[step])}" if step in shares else "")),
    )  # fmt: skip


def parts(run: Run) -> Figure:
    name, title = "parts", "Where the time of a step goes"
    lines = timed(run)
    shares = mean_parts(run)
    total = sum(shares.values())
    if not total:
        return Figure(name, title, "", missing="the metrics hold no time by part: " + without_steps(run))
    count = min(len(lines), _MAX_STRETCHES)
    stretches = [lines[len(lines) * i // count : len(lines) * (i + 1) // count] for i in range(count)]
    xs = [number(stretch[-1].get("step")) or 0.0 for stretch in stretches]
    means = {
        part: [sum(number(line.get(f"{part}_s")) or 0.0 for line in stretch) / len(stretch) for stretch in stretches]
        for part in PARTS
    }
    layers = [(part, means[part], i) for i, part in enumerate(PARTS)]
    largest = sorted(shares, key=lambda part: -shares[part])[:2]
    says = f"A step takes {seconds(total)}, the mean over ranks and steps: " + ", ".join(
        f"{part} {percent(shares[part] / total)}" for part in largest
    )
    says += f", waiting for slower ranks {percent(shares['wait'] / total)}."
    if all(line.get("reduce_s") is None for line in lines):
        says += " Reducing is not told apart here: the collectives run inside forward and backward."
    notes = [f"{seconds(share)}, {percent(share / total)}" for share in shares.values()]
    keys = [Key(part, i, "area", notes[i]) for i, part in enumerate(PARTS)]
    svg = area_chart(xs, layers, seconds, format_x=compact, overlay=Overlay(marks=resumes(run, xs)))
    hints = hints_of_layers(xs, layers, [f"until step {x:,.0f}" for x in xs], seconds)
    rows = [[f"{x:,.0f}", *(seconds(values[i]) for _, values, _ in layers)] for i, x in enumerate(xs)]
    return Figure(
        name, title, says, svg, unit="seconds a step, mean over ranks",
        keys=keys, table=Table(("step", *PARTS), rows), hints=hints,
    )  # fmt: skip


def traffic(run: Run) -> Figure:
    name, title = "bytes", "Bytes that rank 0 passed on, per step"
    wire, staged = per_step(run, "wire_bytes"), per_step(run, "staged_bytes")
    if not wire and not staged:
        return Figure(name, title, "", missing="two logged steps of one attempt are needed, and there are fewer")
    lines = [Line("network, loopback included", wire, 1, "dashed"), Line("shared memory", staged, 2)]
    last = [points[-1][1] if points else 0.0 for points in (wire, staged)]
    says = f"In a step {byte_size(last[0])} went over the network and {byte_size(last[1])} through shared memory."
    drawn = [line for line in lines if line.points]
    svg = line_chart(drawn, byte_size, format_x=compact, from_zero=True, marks=resumes(run))
    moved = dict(per_step(run, "moved_bytes"))
    at = dict(staged)
    passed_on = [(step, value, at.get(step, 0.0), moved.get(step, 0.0)) for step, value in wire]
    rows = [[f"{step:,.0f}", *map(byte_size, sizes)] for step, *sizes in passed_on]
    return Figure(
        name, title, says, svg, unit="bytes a step",
        keys=[Key("network, loopback included", 1, "dashed"), Key("shared memory", 2)],
        table=Table(("step", "network", "shared memory", "moved in memory"), rows),
        hints=hints_of(staged or wire, lambda step, value: f"step {step:,.0f}\n{byte_size(value)}"),
    )  # fmt: skip


def source_figures(run: Run) -> list[Figure]:
    """Draw the loss of each source and the perplexity of each evaluation set; no figure for a single one."""
    trained = [(name, run.points(f"loss_{name}")) for name in _source_names(run)]
    evaluated = [
        (name or "held out", run.points(f"eval_{name}_perplexity" if name else "eval_perplexity", run.evaluated))
        for name in evaluation_sets(run.evaluated)
    ]
    return [
        *_figure_of_several("source-loss", "Training loss of each source", "nats per token", "source", trained),
        *_figure_of_several("set-perplexity", "Perplexity of each evaluation set", "perplexity", "set", evaluated),
    ]


def _figure_of_several(name: str, title: str, unit: str, kind: str, labelled: list[tuple[str, Points]]) -> list[Figure]:
    if len(labelled) < 2 or not any(points for _, points in labelled):
        return []
    smooth = all(len(points) >= _MIN_SMOOTHED for _, points in labelled if points)
    return [labelled_lines(name, title, Axis(unit, significant), labelled, kind, smooth)]


def _source_names(run: Run) -> list[str]:
    sources = run.setting("data", "sources")
    entries = sources if isinstance(sources, list) else []
    return [str(source["name"]) for source in entries if isinstance(source, dict) and "name" in source]


def expert_figures(run: Run) -> list[Figure]:
    """Draw the load of experts and the router loss; no figure for a model without experts."""
    lines = [(number(line.get("step")), _layer_loads(line)) for line in run.steps]
    loads = [(step, layers) for step, layers in lines if step is not None and layers]
    return [_expert_load(run, loads), *_router_loss(run)] if loads else []


def _expert_load(run: Run, loads: list[tuple[float, list[float]]]) -> Figure:
    worst: Points = [(step, max(layers)) for step, layers in loads]
    mean: Points = [(step, sum(layers) / len(layers)) for step, layers in loads]
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


def _router_loss(run: Run) -> list[Figure]:
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


def _layer_loads(line: Object) -> list[float]:
    loads = line.get("busiest_expert")
    return [value for load in loads if (value := number(load)) is not None] if isinstance(loads, list) else []
