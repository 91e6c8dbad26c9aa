"""The texts, key figures and tables about one run in the report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from aliquot.catalogue.instances import catalogue, instances
from aliquot.core.number_format import (
    byte_size,
    compact,
    count_of,
    dollars,
    duration,
    gib,
    percent,
    rate,
    seconds,
    short,
)
from aliquot.observe.report.charts import Table
from aliquot.observe.report.memory_figures import host_top_bytes, limit_bytes, top_bytes
from aliquot.observe.report.read_run import BEGINS, Object, Points, Run, as_object, last, number, objects

NOT_RECORDED = "not recorded"
_NOTHING = ("", "", "")
_COMPARED = {"loss": "{:.4f}", "perplexity": "{:,.2f}", "bits_per_byte": "{:.3f}", "rewards/accuracies": "{:.3f}"}
_SHORT_MEASUREMENT_OFF_BY = 2.0  # assumed: a larger difference has other reasons than the measurement of the machine
_LEVELS = {"problem": 0, "warning": 1, "ok": 2}


def if_recorded(value: float | None, words: Callable[[float], str]) -> str:
    return words(value) if value is not None else NOT_RECORDED


def change(points: Points) -> str:
    """Format the first and the last value: `8.4261 (step 1) -> 4.9120 (step 700)`; empty without points."""
    ends = points[:1] + points[1:][-1:]
    return " -> ".join(f"{value:.4f} (step {step:,.0f})" for step, value in ends)


def speed_beside_plan(plan: Mapping[str, Any], speed: float) -> str | None:
    """Return a line if the measured `speed` (tokens/s) lies outside the band of the plan, otherwise None."""
    planned, off_by = number(plan.get("tokens_per_s")), number(plan.get("off_by"))
    if not planned or not off_by or not speed > 0 or planned / off_by <= speed <= planned * off_by:
        return None
    text = f"planned {planned:,.0f} tokens/s, measured {speed:,.0f}"
    if plan.get("device") != "cpu":
        return text
    if speed * max(off_by, _SHORT_MEASUREMENT_OFF_BY) < planned:
        return f"{text}: look for other processes on these cores (top) and a CPU quota (aliquot doctor)"
    return f"{text}: calibrate the idle machine (`aliquot plan --calibrate`)"


def cost(run: Run, training_s: float) -> str | None:
    """Return the on-demand price of the time that the run has trained; None if no price is known."""
    nodes, name = number(run.about.get("nodes")) or 1.0, str(run.machine.get("instance"))
    price = next((ec2.usd_per_hour for ec2 in instances() if ec2.name == name), None)
    if price is None or not nodes * training_s > 0:
        return None
    return f"{dollars(nodes * price * training_s / 3600)} USD, {nodes:.0f} x {name} on demand ({catalogue().source})"


def summary(run: Run) -> str:
    """Describe the run in a line."""
    about = run.about
    parameters, ranks, nodes = (number(about.get(key)) for key in ("parameters", "world_size", "nodes"))
    words = [
        str(about.get("model") or "model not recorded"),
        f"{compact(parameters)} parameters" if parameters else "",
        str(run.setting("train", "precision") or ""),
        f"engine {about.get('engine')}" if about.get("engine") else "",
        count_of(ranks, "rank") if ranks else "",
        f"{nodes:.0f} nodes" if nodes and nodes > 1 else "",
    ]
    return " · ".join(word for word in words if word)


def when(run: Run) -> str:
    """Describe the directory of the run, its start and its duration, including pauses between attempts."""
    times = [at for event in run.events if (at := number(event.get("time"))) is not None]
    if not times:
        return f"{run.path}; its start was not recorded"
    duration_text = f", {duration(times[-1] - times[0])} until the last event" if len(times) > 1 else ""
    return f"{run.path}, begun {_moment(times[0])}{duration_text}"


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return the key figures as (label, value, note)."""
    done, total, epochs = steps_done(run), total_steps(run), run.points("epoch")
    planned_steps = f"of {total:,.0f}" if total else "the planned number was not recorded"
    in_epochs = f"; epoch {last(epochs):.3g}" if epochs else ""
    named = f" ({run.main_set})" if run.main_set else ""
    names = ("loss", "perplexity", "rewards/accuracies", "bits_per_byte")
    losses, perplexities, accuracies, bits = (run.evaluated(name) for name in names)
    training_s, tokens = run.training_s(), run.points("tokens")
    speed, mfu, ceiling = run.average("tokens_per_s"), run.average("mfu"), run.ceiling
    ceiling_note = f"of {rate(ceiling, 'FLOP/s')}, a plain matmul here" if ceiling else "of a plain matmul here"
    limit, step_s = limit_bytes(run), _step_s(run)
    limit_note = f"the largest rank, of {gib(limit)}" if limit is not None else "the largest rank"
    pace = f"{percent(run.mean_parts()['wait'] / (step_s or 1.0))} waiting"
    if step_s:
        slowest_s, step = run.slowest()
        pace += f"; the slowest line, at step {step:,.0f}: {seconds(slowest_s)}"
    # A figure without a value is left out.
    figures = [
        ("steps", f"{done:,.0f}", planned_steps + in_epochs),
        ("training loss", *_last(run.points("loss"), "no step was logged")),
        (f"evaluation loss{named}", *_last(losses, "nothing was evaluated")),
        (f"perplexity{named}", short(last(perplexities)) if perplexities else "", "on held-out text"),
        (
            f"accuracy{named}",
            percent(last(accuracies)) if accuracies else "",
            "of held-out pairs have the preferred order",
        ),
        (f"bits per byte{named}", f"{last(bits):.3f}" if bits else "", "of held-out text"),
        ("training time", duration(training_s) if training_s > 0 else "", cost(run, training_s) or "without pauses"),
        ("tokens", compact(last(tokens)) if tokens else "", "trained on, padding not counted"),
        ("real tokens/s", compact(speed[0]), speed[1]) if speed else _NOTHING,
        ("MFU", percent(mfu[0]), ceiling_note) if mfu else _NOTHING,
        ("MFU", "unknown" if speed and not mfu else "", "the matmul ceiling was not measured"),
        ("peak memory", gib(top_bytes(run) or 0.0) if run.rows else "", limit_note),
        ("a step", seconds(step_s) if step_s else "", pace),
    ]
    return [(label, value, note) for label, value, note in figures if value]


def _last(points: Points, missing: str) -> tuple[str, str]:
    """Return the last value, and where it came from, as a figure and its note."""
    if not points:
        return "none", missing
    start, end = points[0], points[-1]
    return f"{end[1]:.4f}", f"from {start[1]:.4f} {_at(start[0])}" if start != end else _at(end[0])


def _at(step: float) -> str:
    return f"at step {step:,.0f}" if step else "before training"


def evaluations(run: Run) -> Table:
    """Compare the first, the last and the best evaluation of every set; no rows without two evaluations."""
    rows = []
    for name in run.evaluation_sets:
        for key, words in _COMPARED.items():
            points = run.evaluated(key, name)
            if len(points) > 1:
                best = (max if key.startswith("rewards/") else min)(points, key=lambda point: point[1])
                cells = [f"{words.format(value)} {_at(step)}" for step, value in (points[0], points[-1], best)]
                rows.append([f"{name} {key.replace('_', ' ')}".strip(), *cells])
    return Table(("", "first", "last", "best"), rows)


def data_lines(run: Run, key: str) -> list[str]:
    """Return the recorded lines about the data: its `summary`, or its first `samples`."""
    lines = as_object(run.about.get("data")).get(key)
    return [str(line) for line in lines] if isinstance(lines, list) else []


def _step_s(run: Run) -> float:
    """Return the mean seconds of a step without waits for saves, to compare them with the plan."""
    return sum(value for part, value in run.mean_parts().items() if part != "checkpoint")


def foresight(run: Run) -> Table:
    """Compare the plan with measurements; no rows without a plan."""
    speed, wire = run.average("tokens_per_s"), run.per_step("wire_bytes")
    ranks = number(run.about.get("world_size")) or 1.0
    peak, host_peak = top_bytes(run), host_top_bytes(run)
    sent = ranks * wire[-1][1] if wire else None  # the counter of a rank includes loopback
    compared: list[tuple[str, tuple[str, ...], float | None, Callable[[float], str]]] = [
        ("peak memory of a rank", ("peak_bytes_per_rank",), peak, gib),
        ("of the machine's memory", ("host_peak_bytes_per_rank",) if host_peak else (), host_peak, gib),
        ("real tokens/s", ("tokens_per_s",), speed[0] if speed is not None else None, compact),
        ("a step", ("step_s",), _step_s(run) or None, seconds),
        ("network with loopback, all ranks, a step", ("wire_bytes_per_step", "local_bytes_per_step"), sent, byte_size),
    ]
    rows = []
    for name, keys, value, words in compared:
        numbers = [planned for key in keys if (planned := number(run.plan.get(key))) is not None]
        if numbers and len(numbers) == len(keys):
            planned = sum(numbers)
            error = f"{100 * (planned / value - 1):+.0f} %" if value else ""
            rows.append([name, words(planned), if_recorded(value, words), error])
    return Table(("", "planned", "measured", "the plan is off by"), rows)


def checkpoints(run: Run) -> Table:
    """Build a table of recorded saves and existing checkpoints. Show only the newest save of each step."""
    saved = {
        int(step): event
        for event in run.events
        if event.get("event") == "checkpoint" and (step := number(event.get("step"))) is not None
    }
    rows = []
    for step in sorted({*saved, *run.checkpoints}):
        took, stall = (number(saved.get(step, {}).get(key)) for key in ("seconds", "stall_s"))
        size = gib(run.checkpoints[step]) if step in run.checkpoints else "removed since"
        rows.append([f"{step:,}", if_recorded(took, seconds), if_recorded(stall, seconds), size])
    return Table(("step", "duration", "training waited", "on disk"), rows)


def history(run: Run) -> list[tuple[str, str, str]]:
    """Return (time, event, detail) of each event except saves, with the original texts of warnings."""
    began = next((at for event in run.events if (at := number(event.get("time"))) is not None), None)
    words = {"start": "started", "resume": "resumed", "end": "complete"}
    entries = []
    for event in (event for event in run.events if event.get("event") != "checkpoint"):
        kind = str(event.get("event"))
        at, step = number(event.get("time")), number(event.get("step"))
        when = f"+ {duration(at - began)}" if at is not None and began is not None else ""
        origins = {
            "start": f"{_moment(at)}, " if at is not None else "",
            "resume": f"from {event.get('resumed_from')}, ",
        }
        ranks = number(event.get("world_size"))
        started = "ranks not recorded" if ranks is None else count_of(ranks, "rank")
        more = f"{origins[kind]}{started}" if kind in BEGINS else str(event.get("text", ""))
        name = words.get(kind, kind.replace("_", " "))
        entries.append((when, f"{name} at step {step:,.0f}" if step is not None else kind, more))
    newest = entries[-1][1].split()[0] if entries else ""
    if run.status.word in ("killed", "running", "failed") and newest != run.status.word:
        entries.append(("", run.status.word, run.status.detail))
    return entries


def machine(run: Run) -> list[tuple[str, str]]:
    """Return facts about the machine of rank 0, including the kernel of its matrix products."""
    facts, about = run.machine, run.about
    precision = str(run.setting("train", "precision") or "bf16")
    limit = number(facts.get("memory_limit_bytes"))
    known = {
        **({"EC2 instance": facts["instance"]} if facts.get("instance") else {}),
        "CPU": facts.get("cpu"),
        "physical cores": facts.get("physical_cores"),
        "CPU quota": facts.get("cpu_quota") or "none",
        "NUMA nodes": facts.get("numa_nodes"),
        "instruction sets": ", ".join(map(str, facts["isa"])) if isinstance(facts.get("isa"), list) else None,
        f"dispatched for {precision} matmul": as_object(facts.get("matmul_kernels")).get(precision),
        "matmul ceiling, all ranks": rate(ceiling, "FLOP/s") if (ceiling := run.ceiling) else None,
        "GPUs": (", ".join(map(str, facts["gpus"])) or "none") if isinstance(facts.get("gpus"), list) else None,
        "memory": gib(limit) if limit else None,
        "allocator": facts.get("allocator"),
        "placement": about.get("placement"),
        "host": facts.get("host"),
        "kernel": facts.get("kernel"),
        "Python": facts.get("python"),
        "torch": facts.get("torch"),
        "transformers": facts.get("transformers"),
        "aliquot": about.get("aliquot"),
    }
    return [(name, str(value) if value not in (None, "") else NOT_RECORDED) for name, value in known.items()]


def doctor(run: Run) -> tuple[list[Object], str]:
    """Return the findings of doctor.json, the worst first, and the reason if there are none.

    `aliquot doctor --json` prints the findings: objects with `id`, `level`, `found`, `meaning` and `fix`.
    """
    if run.doctor is None:
        return [], f"there is no doctor.json: aliquot doctor --run-directory {run.path} writes it"
    findings = sorted(objects(run.doctor), key=lambda item: _LEVELS.get(str(item.get("level")), len(_LEVELS)))
    return findings, "" if findings else "doctor.json holds no findings"


def commands(run: Run) -> list[tuple[str, str]]:
    """Return (purpose, command): the command that started the run, and one that repeats it under another name."""
    repeat = shlex.join([
        "aliquot", "train", str(run.path / "config.yaml"), f"run.name={run.name}-again",
        f"run.directory={run.path.with_name(run.path.name + '-again')}",
    ])  # fmt: skip
    started = run.about.get("command")
    return [
        ("as it was started", str(started) if started else NOT_RECORDED),
        ("to repeat it under another name", repeat),
    ]


def steps_done(run: Run) -> float:
    """Return the last step, without steps that a later attempt repeats."""
    start = max((at for at, event in enumerate(run.events) if event.get("event") in BEGINS), default=0)
    ends = [number(event.get("step")) for event in run.events[start:]]
    return max([step for step, _ in run.points("loss")] + [step for step in ends if step is not None], default=0.0)


def total_steps(run: Run) -> float | None:
    return number(run.about.get("total_steps")) or number(run.setting("train", "max_steps"))


def _moment(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return "at an unknown time"
