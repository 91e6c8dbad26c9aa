"""The figures of one run, except for memory: loss, speed, parts of a step, traffic, sources and experts."""

from __future__ import annotations

from bisect import bisect_right

from aliquot.core.number_format import byte_size, compact, count_of, percent, rate, seconds, short
from aliquot.observe.report.charts import Figure, Layer, Line, labelled_lines
from aliquot.observe.report.read_run import Points, Run, first, last, median, number, objects
from aliquot.observe.step_clock import PARTS

_MAX_BARS = 60  # in the figure of step time, where a bar is the mean of consecutive steps
_LOSS_UNITS = {"None": "nats per token", "sft": "nats per token", "kto": "loss of a rated answer"}  # by train.objective


def resumes(run: Run) -> dict[float, str]:
    """Return marks at the resumes between the first and the last logged step."""
    steps = [step for step, _ in run.points("loss")]
    inside = [step for step in run.beginnings if steps and step > 0 and steps[0] <= step <= steps[-1]]
    return {step: f"resumed at {step:,.0f}" for step in inside}


def without_steps(run: Run) -> str:
    return f"no step has been logged yet ({run.status.word}: {run.status.detail})"


def loss(run: Run) -> Figure:
    trained, evaluated = run.points("loss"), run.evaluated("loss")
    steps = count_of(compact(max((step for step, _ in trained), default=0.0)), "step")
    beginning = f"went from {first(evaluated):.4f} to" if len(evaluated) > 1 else "ended at"
    ending = f"evaluation loss {beginning} {last(evaluated):.4f}" if evaluated else "nothing was evaluated"
    times = sum(event.get("event") == "resume" for event in run.attempts)
    resumed = f" The run was resumed {count_of(times, 'time')}." if times else ""
    says = f"Training loss went from {first(trained):.4f} to {last(trained):.4f} over {steps}; {ending}.{resumed}"
    epochs = {step: f"{value:.3g}" for step, value in run.points("epoch")}
    # Evaluations before the first step are no reason to draw a loss.
    lines = [
        Line("training loss", trained, 0, smooth=True),
        Line("evaluation loss", evaluated if trained else [], 1, "dots dashed"),
    ]
    return Figure(
        "loss", "Loss", says, without_steps(run),
        _LOSS_UNITS.get(str(run.setting("train", "objective")), "loss of a pair"), "{:.3g}".format, "{:.4f}".format,
        lines, marks=resumes(run), columns={"epoch": epochs} if epochs else {},
    )  # fmt: skip


def perplexity(run: Run) -> Figure:
    points = run.evaluated("perplexity")
    keys = ("eval_path", "eval_split", "eval_fraction", "eval_sources")
    why = (
        "no evaluation was made yet: set train.eval_steps for more than the one at the end"
        if any(run.setting("data", key) for key in keys)
        else "there is no evaluation text: set data.eval_fraction, eval_path or eval_split"
    )
    step, best = min(points, key=lambda point: point[1], default=(0.0, 0.0))
    says = (
        f"{count_of(len(points), 'evaluation')}; the last gave {short(last(points))}, the best {short(best)} at step"
        f" {step:,.0f}."
    )
    return Figure(
        "perplexity", "Perplexity on held-out text", says, why, "perplexity per predicted token, logarithmic",
        short, "{:,.2f}".format, [Line("perplexity", points, 1, "dots")], marks=resumes(run), log=True,
        columns={"bits per byte": {step: f"{value:.3f}" for step, value in run.evaluated("bits_per_byte")}},
    )  # fmt: skip


def rewards(run: Run) -> list[Figure]:
    """Draw rewards of preference training, and accuracy if answers are in pairs; no figures for another objective."""
    chosen, rejected, accuracies = (run.points(f"rewards/{name}") for name in ("chosen", "rejected", "accuracies"))
    if not chosen or not rejected:
        return []
    held_out = run.evaluated("rewards/accuracies")
    margins = {step: f"{value:.4f}" for step, value in run.evaluated("rewards/margins")}
    says = f"The rewards of chosen and rejected answers ended at {last(chosen):.3f} and {last(rejected):.3f}."
    also = f", and {percent(last(held_out))} of held-out pairs" if held_out else ""
    counted = f"{percent(last(accuracies))} of the last pairs have the higher reward for the chosen answer{also}."
    figures = [
        Figure(
            "rewards", "Rewards of answers", says, "", "reward", "{:.3g}".format, "{:.4f}".format,
            [Line("chosen", chosen, 2, smooth=True), Line("rejected", rejected, 1, smooth=True)], marks=resumes(run),
        ),
        Figure(
            "accuracy", "Pairs with the preferred order", counted, "", "share of pairs", percent, percent,
            [Line("training", accuracies, 0, smooth=True), Line("held-out", held_out, 1, "dots dashed")],
            from_zero=True, marks=resumes(run), columns={"held-out margin": margins} if margins else {},
        ),
    ]  # fmt: skip
    return figures if accuracies else figures[:1]


def learning_rate(run: Run) -> Figure:
    points = run.points("learning_rate")
    step, high = max(points, key=lambda point: point[1], default=(0.0, 0.0))
    says = f"The learning rate peaked at {high:.2e} at step {step:,.0f} and ended at {last(points):.2e}."
    return Figure(
        "learning-rate", "Learning rate", says, without_steps(run), "learning rate", "{:.3g}".format, "{:.2e}".format,
        [Line("learning rate", points, 3)], from_zero=True, marks=resumes(run),
    )  # fmt: skip


def gradient_norm(run: Run) -> Figure:
    points = run.points("grad_norm")
    clip, high = number(run.setting("train", "max_grad_norm")), max((value for _, value in points), default=0.0)
    clipped = sum(value > (clip or 0.0) for _, value in points)
    says = f"The norm of all gradients was {short(median(points))} in the middle and at most {short(high)}."
    clips = (
        f" train.max_grad_norm clipped it at {clip:g} in {clipped:,} of {len(points):,} logged steps." if clip else ""
    )
    return Figure(
        "gradient-norm", "Gradient norm", says + clips, without_steps(run), "norm before clipping", short, short,
        [Line("gradient norm", points, 5, smooth=True)], from_zero=True, marks=resumes(run),
        levels={f"clipped above {clip:g}": clip} if clip and 0 < clip <= 2.5 * high else {},
    )  # fmt: skip


def speed(run: Run) -> Figure:
    points = run.steady("tokens_per_s")
    says = (
        f"{compact(median(points))} real tokens a second in the middle of the run; padding is not counted, nor is the"
        " first step of each attempt."
    )
    return Figure(
        "tokens", "Real tokens per second", says, without_steps(run), "mean of the last ten steps, over all ranks",
        compact, "{:,.0f}".format, [Line("real tokens/s", points, 0)], from_zero=True, marks=resumes(run),
    )  # fmt: skip


def utilisation(run: Run) -> Figure:
    points, shares = run.steady("flops_per_s"), dict(run.points("mfu"))
    # Every attempt measures the compute ceiling, perhaps on another machine.
    ceiling = [(step, value / shares[step]) for step, value in points if shares.get(step, 0) > 0]
    compared = f", {percent(median(run.steady('mfu')))} of what a plain matmul reached on the same cores"
    says = (
        f"The model needed {rate(median(points), 'FLOP/s')}"
        f"{compared if ceiling else '; the matmul ceiling was not measured'}. Recomputation is not counted."
    )
    lines = [
        Line("model FLOP/s", points, 2),
        Line("a plain matmul here", ceiling, 1, "dashed", rate(last(ceiling), "FLOP/s")),
    ]
    return Figure(
        "mfu", "Model FLOP/s against the matmul ceiling", says, without_steps(run), "FLOP/s over all ranks",
        lambda value: rate(value, ""), lambda value: rate(value, "FLOP/s"), lines, from_zero=True, marks=resumes(run),
        columns={"MFU": {step: percent(shares[step]) if step in shares else "unknown" for step, _ in points}},
    )  # fmt: skip


def parts(run: Run) -> Figure:
    lines, means = run.timed(), run.mean_parts()
    total = sum(means.values()) or 1.0
    shares = {part: percent(mean / total) for part, mean in means.items()}
    largest = ", ".join(f"{part} {shares[part]}" for part in sorted(means, key=lambda part: -means[part])[:2])
    says = (
        f"A step takes {seconds(total)}, the mean over ranks and steps: {largest}, waiting for slower ranks"
        f" {shares['wait']}."
    )
    if all(line.get("reduce_s") is None for line in lines):
        says += " Reducing is not measured separately: the collectives run inside forward and backward."
    count = min(len(lines), _MAX_BARS) if any(means.values()) else 0
    stretches = [lines[len(lines) * i // count : len(lines) * (i + 1) // count] for i in range(count)]
    ends = [number(stretch[-1].get("step")) or 0.0 for stretch in stretches]
    layers = [
        Layer(
            part,
            [sum(number(line.get(f"{part}_s")) or 0.0 for line in stretch) / len(stretch) for stretch in stretches],
            i, f"{seconds(means[part])}, {shares[part]}",
        )
        for i, part in enumerate(PARTS)
    ]  # fmt: skip
    return Figure(
        "parts", "Where the time of a step goes", says, "the metrics hold no time by part: " + without_steps(run),
        "seconds a step, mean over ranks", seconds, seconds, bars=[f"{end:,.0f}" for end in ends], layers=layers,
        marks={bisect_right(ends, step): text for step, text in resumes(run).items()}, x="until step",
    )  # fmt: skip


def traffic(run: Run) -> Figure:
    wire, staged, moved = (run.per_step(f"{path}_bytes") for path in ("wire", "staged", "moved"))
    says = (
        f"In a step {byte_size(last(wire))} went over the network and {byte_size(last(staged))} through shared memory."
    )
    return Figure(
        "bytes", "Bytes that rank 0 sent, per step", says,
        "two logged steps of one attempt are needed, and there are fewer", "bytes a step", byte_size, byte_size,
        [Line("shared memory", staged, 2), Line("network, loopback included", wire, 1, "dashed")],
        from_zero=True, marks=resumes(run),
        columns={"moved in memory": {step: byte_size(value) for step, value in moved}},
    )  # fmt: skip


def source_figures(run: Run) -> list[Figure]:
    """Draw the loss of each source and the perplexity of each evaluation set; no figure for a single source or set."""
    names = [str(source["name"]) for source in objects(run.setting("data", "sources")) if "name" in source]
    trained = [(name, run.points(f"loss_{name}")) for name in names]
    evaluated = [(name or "held out", run.evaluated("perplexity", name)) for name in run.evaluation_sets]
    drawings = [
        ("source-loss", "Training loss of each source", "nats per token", trained, "source"),
        ("set-perplexity", "Perplexity of each evaluation set", "perplexity, logarithmic", evaluated, "set"),
    ]
    return [
        labelled_lines(Figure(name, title, "", "", unit, short, short, log=kind == "set"), labelled, kind, smooth=True)
        for name, title, unit, labelled, kind in drawings
        if len(labelled) > 1 and any(points for _, points in labelled)
    ]


def expert_figures(run: Run) -> list[Figure]:
    """Draw the load of experts and the router loss; no figure for a model without experts."""
    loads, router_losses = run.number_lists("busiest_expert"), run.points("router_loss")
    if not loads:
        return []
    worst: Points = [(step, max(layers)) for step, layers in loads]
    mean: Points = [(step, sum(layers) / len(layers)) for step, layers in loads]
    ends = loads[-1][1]
    unused = dict(run.points("unused_experts"))
    says = (
        f"At the end the busiest expert of a layer had {short(last(mean))} times the mean load, averaged over"
        f" {count_of(len(ends), 'layer')}, at worst {short(max(ends))} times"
        f" (layer {ends.index(max(ends))}); {count_of(unused.get(worst[-1][0], 0), 'expert')} got no token since the"
        " last line."
    )
    load = Figure(
        "expert-load", "Load of the busiest expert", says, "", "times the mean load of its layer", short,
        short, [Line("worst layer", worst, 1), Line("mean of the layers", mean, 0)],
        from_zero=True, levels={"even": 1.0}, marks=resumes(run),
        columns={"unused experts": {step: f"{count:,.0f}" for step, count in unused.items()}},
    )  # fmt: skip
    router_loss = Figure(
        "router-loss", "Router loss, which balances the experts",
        f"Balancing the routers added {short(last(router_losses))} to the training loss at the end.", "",
        "nats per token", short, "{:.5f}".format, [Line("router_aux_loss_coef x balance", router_losses, 0)],
        marks=resumes(run),
    )  # fmt: skip
    return [load, router_loss] if router_losses else [load]
