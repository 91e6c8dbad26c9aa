"""What the report says of one run in words and numbers, beside its pictures."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from datetime import UTC, datetime

from aliquot.observe.number_format import byte_size, compact, duration, gib, percent, rate, seconds, significant
from aliquot.observe.report.figure import Table
from aliquot.observe.report.memory_figures import host_top_bytes, limit_bytes, top_bytes
from aliquot.observe.report.read_run import BEGINS, Object, Run, number
from aliquot.observe.report.series import average, ceiling_of, mean_parts, per_step

NOT_RECORDED = "not recorded"
_LEVELS = {"problem": 0, "warning": 1, "ok": 2}


def summary(run: Run) -> str:
    """The run in a line."""
    about = run.about
    parameters, ranks, nodes = (number(about.get(key)) for key in ("parameters", "world_size", "nodes"))
    words = [
        str(about.get("model") or "model not recorded"),
        f"{compact(parameters)} parameters" if parameters else "",
        str(run.setting("train", "precision") or ""),
        f"engine {about.get('engine')}" if about.get("engine") else "",
        f"{ranks:.0f} rank{'s' if ranks > 1 else ''}" if ranks else "",
        f"{nodes:.0f} nodes" if nodes and nodes > 1 else "",
    ]
    return " · ".join(word for word in words if word)


def when(run: Run) -> str:
    """Where the run lies, when it began and how long it has taken, pauses between attempts included."""
    times = [at for event in run.events if (at := number(event.get("time"))) is not None]
    if not times:
        return f"{run.path}; when it began was not recorded"
    took = f", {duration(times[-1] - times[0])} until the last event" if len(times) > 1 else ""
    return f"{run.path}, begun {_moment(times[0])}{took}"


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The key figures: (label, value, note)."""
    done, total = steps_done(run), total_steps(run)
    found = [("steps", f"{done:,.0f}", f"of {total:,.0f}" if total else "how many were planned was not recorded")]
    losses = run.points("loss")
    found.append(("training loss", f"{losses[-1][1]:.4f}", "at the last logged step") if losses else
                 ("training loss", "none", "no step was logged"))  # fmt: skip
    evaluated, bits = (run.points(f"eval_{name}", run.evaluations) for name in ("perplexity", "bits_per_byte"))
    found.append(("perplexity", significant(evaluated[-1][1]), "on held-out text") if evaluated else
                 ("perplexity", "none", "nothing was evaluated"))  # fmt: skip
    if bits:
        found.append(("bits per byte", f"{bits[-1][1]:.3f}", "of held-out text"))
    speed, mfu, ceiling = average(run, "tokens_per_s"), average(run, "mfu"), ceiling_of(run)
    if speed is not None:
        found.append(("real tokens/s", compact(speed[0]), speed[1]))
    if mfu is not None:
        of = f"of {rate(ceiling, 'FLOP/s')}, a plain matmul here" if ceiling else "of a plain matmul here"
        found.append(("MFU", percent(mfu[0]), of))
    elif speed is not None:
        found.append(("MFU", "unknown", "the matmul ceiling was not measured"))
    if run.rows:
        limit = limit_bytes(run)
        note = f"the largest rank, of {gib(limit)}" if limit is not None else "the largest rank"
        found.append(("peak memory", gib(max(top_bytes(row) for row in run.rows)), note))
    spent = mean_parts(run)
    if step_s := _step_s(run):
        found.append(("a step", seconds(step_s), f"{percent(spent['wait'] / step_s)} waiting"))
    return found


def _step_s(run: Run) -> float:
    """As it is planned: without the saves for which it waited."""
    return sum(value for part, value in mean_parts(run).items() if part != "checkpoint")


def foresight(run: Run) -> Table:
    """The plan beside what was measured; no rows where there is no plan."""
    plan, spent = run.plan, _step_s(run)
    speed, wire = average(run, "tokens_per_s"), per_step(run, "wire_bytes")
    ranks = number(run.about.get("world_size")) or 1.0
    # What ranks count as passed on to the network includes loopback.
    between, on_hosts = (number(plan.get(f"{where}_bytes_per_step")) for where in ("wire", "local"))
    passed_on = between + on_hosts if between is not None and on_hosts is not None else None
    peak = max(map(top_bytes, run.rows)) if run.rows else None
    of_host = host_top_bytes(run)
    compared: list[tuple[str, float | None, float | None, Callable[[float], str]]] = [
        ("peak memory of a rank", number(plan.get("peak_bytes_per_rank")), peak, gib),
        *([("of the machine's memory", number(plan.get("host_peak_bytes_per_rank")), of_host, gib)] if of_host else []),
        ("real tokens/s", number(plan.get("tokens_per_s")), speed[0] if speed is not None else None, compact),
        ("a step", number(plan.get("step_s")), spent or None, seconds),
        ("network with loopback, all ranks, a step", passed_on, ranks * wire[-1][1] if wire else None, byte_size),
    ]
    rows = []
    for name, planned, value, words in compared:
        if planned is not None:
            off = f"{100 * (planned / value - 1):+.0f} %" if value else ""
            rows.append([name, words(planned), words(value) if value is not None else NOT_RECORDED, off])
    return Table(("", "planned", "measured", "the plan is off by"), rows)


def checkpoints(run: Run) -> Table:
    """Saved while the events were written, and those that lie there now. Of a step that was saved again, after the run
    had gone on from an earlier one, the newest."""
    saved = {
        int(step): event
        for event in run.events
        if event.get("event") == "checkpoint" and (step := number(event.get("step"))) is not None
    }
    rows = []
    for step, event in sorted(saved.items()):
        took, stall = number(event.get("seconds")), number(event.get("stall_s"))
        kept = run.checkpoints.get(step)
        rows.append([
            f"{step:,}", seconds(took) if took is not None else NOT_RECORDED,
            seconds(stall) if stall is not None else NOT_RECORDED, gib(kept) if kept is not None else "removed since",
        ])  # fmt: skip
    unsaid = {step: kept for step, kept in run.checkpoints.items() if step not in saved}
    rows += [[f"{step:,}", NOT_RECORDED, NOT_RECORDED, gib(kept)] for step, kept in unsaid.items()]
    return Table(("step", "took", "stood still", "on disk"), rows)


def history(run: Run) -> list[tuple[str, str, str]]:
    """(when, what, more) of each event but the checkpoints; what a warning says is shown as it was written."""
    began = next((at for event in run.events if (at := number(event.get("time"))) is not None), None)
    words = {"start": "started", "resume": "resumed", "end": "complete"}
    found = []
    for event in run.events:
        kind = str(event.get("event"))
        if kind == "checkpoint":
            continue
        at, step = number(event.get("time")), number(event.get("step"))
        when = f"+ {duration(at - began)}" if at is not None and began is not None else ""
        if kind == "resume":
            more = f"from {event.get('resumed_from')}, {_rank_count(event)}"
        elif kind == "start":
            more = (_moment(at) + ", " if at is not None else "") + _rank_count(event)
        else:
            more = str(event.get("text", ""))
        said = words.get(kind, kind.replace("_", " "))
        found.append((when, f"{said} at step {step:,.0f}" if step is not None else kind, more))
    if run.status.word in ("killed", "running", "failed") and (not found or found[-1][1].split()[0] != run.status.word):
        found.append(("", run.status.word, run.status.detail))
    return found


def machine(run: Run) -> list[tuple[str, str]]:
    """Facts of rank 0's machine, with the kernel that matrix products really took."""
    told, about = run.machine, run.about
    precision = str(run.setting("train", "precision") or "bf16")
    kernels = told.get("matmul_kernels")
    limit = number(told.get("memory_limit_bytes"))
    known = {
        "CPU": told.get("cpu"),
        "physical cores": told.get("physical_cores"),
        "CPU quota": told.get("cpu_quota") or "none",
        "NUMA nodes": told.get("numa_nodes"),
        "instruction sets": ", ".join(map(str, told["isa"])) if isinstance(told.get("isa"), list) else None,
        f"dispatched for {precision} matmul": kernels.get(precision) if isinstance(kernels, dict) else None,
        "matmul ceiling, all ranks": rate(ceiling, "FLOP/s") if (ceiling := ceiling_of(run)) else None,
        "GPUs": (", ".join(map(str, told["gpus"])) or "none") if isinstance(told.get("gpus"), list) else None,
        "memory": gib(limit) if limit else None,
        "allocator": told.get("allocator"),
        "placement": about.get("placement"),
        "host": told.get("host"),
        "kernel": told.get("kernel"),
        "Python": told.get("python"),
        "torch": told.get("torch"),
        "transformers": told.get("transformers"),
        "aliquot": about.get("aliquot"),
    }
    return [(name, str(value) if value not in (None, "") else NOT_RECORDED) for name, value in known.items()]


def doctor(run: Run) -> tuple[list[Object], str]:
    """The findings of doctor.json, the worst first, and why there are none.

    They are what `aliquot doctor --json` prints: a list of objects with `id`, `level`, `found`, `meaning` and `fix`.
    """
    if run.doctor is None:
        return [], f"nobody asked the doctor: aliquot doctor --run-directory {run.path}"
    found = [item for item in run.doctor if isinstance(item, dict)] if isinstance(run.doctor, list) else []
    found.sort(key=lambda item: _LEVELS.get(str(item.get("level")), len(_LEVELS)))
    return found, "" if found else "doctor.json holds no findings"


def commands(run: Run) -> list[tuple[str, str]]:
    """(what it does, what to type): as it was started, and how to repeat it under another name."""
    again = shlex.join([
        "aliquot", "train", str(run.path / "config.yaml"), f"run.name={run.name}-again",
        f"run.directory={run.path.with_name(run.path.name + '-again')}",
    ])  # fmt: skip
    started = run.about.get("command")
    return [("as it was started", str(started) if started else NOT_RECORDED), ("to repeat it beside this one", again)]


def steps_done(run: Run) -> float:
    """What an attempt had done beyond the checkpoint that a later one goes on from is not done."""
    began = max((at for at, event in enumerate(run.events) if event.get("event") in BEGINS), default=0)
    ends = [number(event.get("step")) for event in run.events[began:]]
    return max([step for step, _ in run.points("loss")] + [step for step in ends if step is not None], default=0.0)


def total_steps(run: Run) -> float | None:
    return number(run.about.get("total_steps")) or number(run.setting("train", "max_steps"))


def _rank_count(event: Object) -> str:
    ranks = number(event.get("world_size"))
    return f"{ranks:.0f} rank{'s' if ranks != 1 else ''}" if ranks is not None else "ranks not recorded"


def _moment(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return "at an unknown time"
