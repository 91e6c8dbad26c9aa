"""Pictures of a run whose data have several sources, or which is evaluated on several sets: a line each."""

from __future__ import annotations

from aliquot.observe.report.figure import Figure
from aliquot.observe.report.labelled_lines import labelled_lines
from aliquot.observe.report.read_run import Points, Run, evaluation_sets
from aliquot.observe.report.words import significant

_SMOOTH_FROM = 60  # logged steps


def source_figures(run: Run) -> list[Figure]:
    """None where there is one source and one evaluation set."""
    trained = [(name, run.points(f"loss_{name}")) for name in _named(run, "sources")]
    evaluated = [
        (name or "held out", run.points(f"eval_{name}_perplexity" if name else "eval_perplexity", run.evaluated))
        for name in evaluation_sets(run.evaluated)
    ]
    return [
        *_figure("source-loss", "Training loss of each source", "nats per token", "source", trained),
        *_figure("set-perplexity", "Perplexity of each evaluation set", "perplexity", "set", evaluated),
    ]


def _figure(name: str, title: str, unit: str, kind: str, labelled: list[tuple[str, Points]]) -> list[Figure]:
    if len(labelled) < 2 or not any(points for _, points in labelled):
        return []
    smooth = all(len(points) >= _SMOOTH_FROM for _, points in labelled if points)
    return [labelled_lines(name, title, unit, labelled, kind, significant, from_zero=False, smooth=smooth)]


def _named(run: Run, key: str) -> list[str]:
    sources = run.setting("data", key)
    entries = sources if isinstance(sources, list) else []
    return [str(source["name"]) for source in entries if isinstance(source, dict) and "name" in source]
