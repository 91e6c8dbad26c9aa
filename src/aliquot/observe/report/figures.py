"""The figures of one run, except for memory: loss, speed, parts of a step, traffic, sources and experts."""

from __future__ import annotations

from bisect import bisect_right

from aliquot.core.number_format import byte_size, compact, count_of, percent, rate, seconds, significant
from aliquot.observe.report.charts import Axis, Figure, Layer, Line, Mark, labelled_lines, line_figure, stack_figure
from aliquot.observe.report.read_run import Object, Points, Run, evaluation_sets, median, number
from aliquot.observe.step_clock import PARTS

_MAX_BARS = 60  # in the figure of step time, where a bar is the mean of consecutive steps


def resumes(run: Run) -> list[Mark]:
    """Return marks at the resumes between the first and the last logged step."""
    steps = [step for step, _ in run.points("loss")]
    inside = [step for step in run.beginnings if steps and step > 0 and steps[0] <= step <= steps[-1]]
    return [Mark(step, f"resumed at {step:,.0f}") for step in inside]


def without_steps(run: Run) -> str:
    return f"no step has been logged yet ({run.status.word}: {run.status.detail})"


def loss(run: Run) -> Figure:
    trained, evaluated = run.points("loss"), run.points("eval_loss", run.evaluations)
    if not trained:
        return Figure("loss", "Loss", "", missing=without_steps(run))
    steps = count_of(compact(trained[-1][0]), "step")
    says = f"Training loss went from {trained[0][1]:.4f} to {trained[-1][1]:.4f} over {steps}"
    if len(evaluated) > 1:
        says += f"; evaluation loss went from {evaluated[0][1]:.4f} to {evaluated[-1][1]:.4f}."
    else:
        says += f"; evaluation loss ended at {evaluated[0][1]:.4f}." if evaluated else "; nothing was evaluated."
    if times := sum(event.get("event") == "resume" for event in run.attempts):
        says += f" The run was resumed {count_of(times, 'time')}."
    lines = [
        Line("training loss", trained, 0, smooth=True), Line("evaluation loss", evaluated, 1, "dots dashed")
    ]  # fmt: skip
    compared = "loss of a rated answer" if run.setting("train", "objective") == "kto" else "loss of a pair"
    unit = "nats per token" if run.setting("train", "objective") in (None, "sft") else compared
    axis = Axis(unit, "{:.3g}".format, "{:.4f}".format, marks=resumes(run))
    epochs = {step: f"{value:.3g}" for step, value in run.points("epoch")}
    return line_figure(Figure("loss", "Loss", says), axis, lines, {"epoch": epochs} if epochs else {})


def perplexity(run: Run) -> Figure:
    name, title = "perplexity", "Perplexity on held-out text"
    points = run.points("eval_perplexity", run.evaluations)
    if not points:
        keys = ("eval_path", "eval_split", "eval_fraction", "eval_sources")
        why = "there is no evaluation text: set data.eval_fraction, eval_path or eval_split"
        if any(run.setting("data", key) for key in keys):
            why = "no evaluation was made yet: set train.eval_steps for more than the one at the end"
        return Figure(name, title, "", missing=why)
    best = min(points, key=lambda point: point[1])
    says = f"{count_of(len(points), 'evaluation')}; the last gave {significant(points[-1][1])},"
    says += f" the best {significant(best[1])} at step {best[0]:,.0f}."
    unit = "perplexity per predicted token, logarithmic"
    axis = Axis(unit, significant, "{:,.2f}".format, marks=resumes(run), log=True)
    bits = {step: f"{value:.3f}" for step, value in run.points("eval_bits_per_byte", run.evaluations)}
    lines = [Line("perplexity", points, 1, "dots")]
    return line_figure(Figure(name, title, says), axis, lines, {"bits per byte": bits})


def rewards(run: Run) -> list[Figure]:
    """Draw rewards of preference training, and accuracy if answers are in pairs; no figures for another objective."""
    chosen, rejected, accuracies = (run.points(f"rewards/{name}") for name in ("chosen", "rejected", "accuracies"))
    if not chosen or not rejected:
        return []
    evaluated = {name: run.points(f"eval_rewards/{name}", run.evaluations) for name in ("accuracies", "margins")}
    says = f"The rewards of chosen and rejected answers ended at {chosen[-1][1]:.3f} and {rejected[-1][1]:.3f}."
    lines = [Line("chosen", chosen, 2, smooth=True), Line("rejected", rejected, 1, smooth=True)]
    axis = Axis("reward", "{:.3g}".format, "{:.4f}".format, marks=resumes(run))
    rewards_figure = line_figure(Figure("rewards", "Rewards of answers", says), axis, lines)
    if not accuracies:
        return [rewards_figure]
    counted = f"{percent(accuracies[-1][1])} of the last pairs have the higher reward for the chosen answer"
    if held_out := evaluated["accuracies"]:
        counted += f", and {percent(held_out[-1][1])} of held-out pairs"
    shares = [Line("training", accuracies, 0, smooth=True), Line("held-out", held_out, 1, "dots dashed")]
    share_axis = Axis("share of pairs", percent, percent, True, marks=resumes(run))
    margins = {step: f"{value:.4f}" for step, value in evaluated["margins"]}
    return [
        rewards_figure,
        line_figure(Figure("accuracy", "Pairs with the preferred order", f"{counted}."), share_axis, shares,
                    {"held-out margin": margins} if margins else {}),
    ]  # fmt: skip


def learning_rate(run: Run) -> Figure:
    name, title = "learning-rate", "Learning rate"
    points = run.points("learning_rate")
    if not points:
        return Figure(name, title, "", missing=without_steps(run))
    high = max(points, key=lambda point: point[1])
    says = f"The learning rate peaked at {high[1]:.2e} at step {high[0]:,.0f} and ended at {points[-1][1]:.2e}."
    axis = Axis("learning rate", "{:.3g}".format, "{:.2e}".format, True, marks=resumes(run))
    return line_figure(Figure(name, title, says), axis, [Line("learning rate", points, 3)])


def gradient_norm(run: Run) -> Figure:
    name, title = "gradient-norm", "Gradient norm"
    points = run.points("grad_norm")
    if not points:
        return Figure(name, title, "", missing=without_steps(run))
    clip, high = number(run.setting("train", "max_grad_norm")), max(value for _, value in points)
    says = f"The norm of all gradients was {significant(median(points))} in the middle and at most {significant(high)}."
    if clip:
        clipped = sum(value > clip for _, value in points)
        says += f" train.max_grad_norm clipped it at {clip:g} in {clipped:,} of {len(points):,} logged steps."
    levels = {f"clipped above {clip:g}": clip} if clip and 0 < clip <= 2.5 * high else {}
    axis = Axis("norm before clipping", significant, significant, True, levels, marks=resumes(run))
    return line_figure(Figure(name, title, says), axis, [Line("gradient norm", points, 5, smooth=True)])


def speed(run: Run) -> Figure:
    name, title = "tokens", "Real tokens per second"
    points = run.steady("tokens_per_s")
    if not points:
        return Figure(name, title, "", missing=without_steps(run))
    says = f"{compact(median(points))} real tokens a second in the middle of the run; padding is not counted, nor is"
    says += " the first step of each attempt."
    axis = Axis("mean of the last ten steps, over all ranks", compact, "{:,.0f}".format, True, marks=resumes(run))
    return line_figure(Figure(name, title, says), axis, [Line("real tokens/s", points, 0)])


def utilisation(run: Run) -> Figure:
    name, title = "mfu", "Model FLOP/s against the matmul ceiling"
    points = run.steady("flops_per_s")
    if not points:
        return Figure(name, title, "", missing=without_steps(run))
    shares = dict(run.points("mfu"))
    # Every attempt measures the compute ceiling, perhaps on another machine.
    ceiling = [(step, value / shares[step]) for step, value in points if shares.get(step, 0) > 0]
    says = f"The model needed {rate(median(points), 'FLOP/s')}"
    note = ""
    if ceiling:
        note = rate(ceiling[-1][1], "FLOP/s")
        says += f", {percent(median(run.steady('mfu')))} of what a plain matmul reached on the same cores"
    else:
        says += "; the matmul ceiling was not measured"
    lines = [Line("model FLOP/s", points, 2), Line("a plain matmul here", ceiling, 1, "dashed", note)]
    axis = Axis("FLOP/s over all ranks", lambda v: rate(v, ""), lambda v: rate(v, "FLOP/s"), True, marks=resumes(run))
    mfu = {step: percent(shares[step]) if step in shares else "unknown" for step, _ in points}
    return line_figure(Figure(name, title, f"{says}. Recomputation is not counted."), axis, lines, {"MFU": mfu})


def parts(run: Run) -> Figure:
    name, title = "parts", "Where the time of a step goes"
    lines, means = run.timed(), run.mean_parts()
    total = sum(means.values())
    if not total:
        return Figure(name, title, "", missing="the metrics hold no time by part: " + without_steps(run))
    largest = sorted(means, key=lambda part: -means[part])[:2]
    says = f"A step takes {seconds(total)}, the mean over ranks and steps: "
    says += ", ".join(f"{part} {percent(means[part] / total)}" for part in largest)
    says += f", waiting for slower ranks {percent(means['wait'] / total)}."
    if all(line.get("reduce_s") is None for line in lines):
        says += " Reducing is not measured separately: the collectives run inside forward and backward."
    count = min(len(lines), _MAX_BARS)
    stretches = [lines[len(lines) * i // count : len(lines) * (i + 1) // count] for i in range(count)]
    ends = [number(stretch[-1].get("step")) or 0.0 for stretch in stretches]
    layers = []
    for i, part in enumerate(PARTS):
        values = [sum(number(line.get(f"{part}_s")) or 0.0 for line in stretch) / len(stretch) for stretch in stretches]
        layers.append(Layer(part, values, i, f"{seconds(means[part])}, {percent(means[part] / total)}"))
    marks = [Mark(bisect_right(ends, mark.x), mark.text) for mark in resumes(run)]
    axis = Axis("seconds a step, mean over ranks", seconds, seconds, marks=marks, x="until step")
    return stack_figure(Figure(name, title, says), axis, [f"{end:,.0f}" for end in ends], layers)


def traffic(run: Run) -> Figure:
    name, title = "bytes", "Bytes that rank 0 sent, per step"
    wire, staged, moved = (run.per_step(f"{path}_bytes") for path in ("wire", "staged", "moved"))
    if not wire and not staged:
        return Figure(name, title, "", missing="two logged steps of one attempt are needed, and there are fewer")
    last = [byte_size(points[-1][1] if points else 0.0) for points in (wire, staged)]
    says = f"In a step {last[0]} went over the network and {last[1]} through shared memory."
    lines = [Line("shared memory", staged, 2), Line("network, loopback included", wire, 1, "dashed")]
    axis = Axis("bytes a step", byte_size, byte_size, True, marks=resumes(run))
    columns = {"moved in memory": {step: byte_size(value) for step, value in moved}}
    return line_figure(Figure(name, title, says), axis, lines, columns)


def source_figures(run: Run) -> list[Figure]:
    """Draw the loss of each source and the perplexity of each evaluation set; no figure for a single source or set."""
    sources = run.setting("data", "sources")
    entries = sources if isinstance(sources, list) else []
    names = [str(source["name"]) for source in entries if isinstance(source, dict) and "name" in source]
    trained = [(name, run.points(f"loss_{name}")) for name in names]
    evaluated = [
        (name or "held out", run.points(f"eval_{name}_perplexity" if name else "eval_perplexity", run.evaluated))
        for name in evaluation_sets(run.evaluated)
    ]
    loss = Axis("nats per token", significant, significant)
    perplexity = Axis("perplexity, logarithmic", significant, significant, log=True)
    several = [
        (Figure("source-loss", "Training loss of each source", ""), loss, trained, "source"),
        (Figure("set-perplexity", "Perplexity of each evaluation set", ""), perplexity, evaluated, "set"),
    ]
    return [
        labelled_lines(figure, axis, labelled, kind, smooth=True)
        for figure, axis, labelled, kind in several
        if len(labelled) > 1 and any(points for _, points in labelled)
    ]


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
        f" {count_of(len(last), 'layer')}, at worst {significant(max(last))} times"
        f" (layer {last.index(max(last))}); {count_of(without, 'expert')} got no token since the last line."
    )
    lines = [Line("worst layer", worst, 1), Line("mean of the layers", mean, 0)]
    axis = Axis("times the mean load of its layer", significant, significant, True, {"even": 1.0}, marks=resumes(run))
    columns = {"unused experts": {step: f"{count:,.0f}" for step, count in unused.items()}}
    return line_figure(Figure("expert-load", "Load of the busiest expert", says), axis, lines, columns)


def _router_loss(run: Run) -> list[Figure]:
    points = run.points("router_loss")
    if not points:
        return []
    says = f"Balancing the routers added {significant(points[-1][1])} to the training loss at the end."
    axis = Axis("nats per token", significant, "{:.5f}".format, marks=resumes(run))
    figure = Figure("router-loss", "Router loss, which balances the experts", says)
    return [line_figure(figure, axis, [Line("router_aux_loss_coef x balance", points, 0)])]


def _layer_loads(line: Object) -> list[float]:
    loads = line.get("busiest_expert")
    return [value for load in loads if (value := number(load)) is not None] if isinstance(loads, list) else []
