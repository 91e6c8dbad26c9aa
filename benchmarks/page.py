"""Write docs/reference/benchmarks.md from the newest result files: `python -m benchmarks.page`.

A result file is benchmarks/results/BENCHMARK-DATE-HARDWARE[-PART].json, as `--json` of a benchmark writes it. PART
separates runs of one benchmark that measure different things. tests/test_benchmark_rows.py keeps the page up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Row

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "benchmarks.md"
_NAME = re.compile(r"(?P<benchmark>[a-z_]+)-(?P<date>\d{4}-\d\d-\d\d)-(?P<hardware>[a-z0-9]+)(?:-(?P<part>\w+))?")
_HEAD = """# Benchmarks

<!-- made by `python -m benchmarks.page` from benchmarks/results/*.json -->

All measured figures, from the newest result file of each benchmark and hardware. Compare figures only within a table,
because the speed of shared machines varies. `make bench` repeats the CPU benchmarks.

- **host**, **fsdp**: engines of aliquot. **125m**, **500m**, **1b**: Llama models with that many parameters.
- **MFU**: model FLOP/s divided by the rate of plain matrix products on all ranks at once, measured in the same run.
- **packed**: documents of 65 tokens on average, isolated from each other. In other rows, documents fill sequences.
- **tuned**: the peer runs with tcmalloc and with one core per rank, as aliquot does by default.
- **ratio**: how many times aliquot is better than the peer: faster, or smaller in seconds, bytes and memory.
- **PSS**: private memory of a process plus its share of shared memory. **RSS** counts shared memory in full.
- **error**: plan divided by measurement, minus 1. Of tokens/s in `foresight`: measurement divided by plan, minus 1.
- **\\***: copied from notes, because the result file of that run was not kept.
"""


@dataclass(frozen=True)
class Result:
    """One result file."""

    benchmark: str
    date: str
    hardware: str
    part: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One figure of aliquot and of each peer in the rows of one result file.

    Args:
        what: a format string with the names of columns in braces.
        column: the column of the figure.
        ours: the values that select aliquot's row; a peer's row differs only in the column `who`.
        who: the column that names aliquot and its peers.
        peers: values of `who`.
    """

    benchmark: str
    what: str
    column: str
    ours: dict[str, Any]
    peers: tuple[str, ...]
    who: str = "who"
    higher: bool = False


_FSDP2, _DEEPSPEED = "plain FSDP2, tuned", "DeepSpeed ZeRO-3, tuned"
_TRAINER = "HF Trainer + DeepSpeed ZeRO-3"
_LOADERS = (
    "transformers + DeepSpeed zero.Init", "transformers DistributedConfig(fsdp_size)",
    "torch DCP HuggingFaceStorageReader",
)  # fmt: skip
_DATASETS = "datasets, tokens (map, a process a core), first time"
_PEFT = "peft + HF Trainer + DDP"
COMPARISONS = (
    *(
        Comparison("step", f"{shape}, steps: {what}", column, {"shape": shape, "who": "host"}, peers, higher=up)
        for shape, peers in (("125m", (_DEEPSPEED, _FSDP2)), ("500m", (_DEEPSPEED,)))
        for what, column, up in (("tokens/s", "tokens_per_s", True), ("peak RSS, GB", "peak_rss_gb", False))
    ),
    *(
        Comparison(
            "hosts", f"{shape}, {hosts} hosts, 1 Gbit/s: {what}", column,
            {"shape": shape, "hosts": hosts, "link": "1gbit", "who": "aliquot, reduce_dtype bf16"}, (_TRAINER, "FSDP2"),
        )
        for shape in ("125m", "500m")
        for hosts in (2, 3)
        for what, column in (("seconds per step, bf16 gradients", "step_s"), ("MB sent per step", "sent_mb"))
    ),
    Comparison(
        "seed_job", "rows of wikitext-2: real tokens/s", "real_tokens_per_s", {"who": "aliquot, packed"},
        (
            "DeepSpeed, padded to 512", "DeepSpeed, each row at its length", "DeepSpeed, concatenated and split",
        ),
        higher=True,
    ),
    *(
        Comparison("moe", "mixture of experts {shape}: tokens/s", "tokens_per_s",
                   {"shape": shape, "who": "host, full rows"}, (_FSDP2, _DEEPSPEED), higher=True)
        for shape in ("top4of32", "top8of128")
    ),
    *(
        Comparison("lora", f"LoRA, {work}: {what}", column, {"work": work, "who": "aliquot, LoRA"}, (_PEFT,), higher=up)
        for work in ("documents of 65 tokens", "full rows")
        for what, column, up in (("tokens/s", "tokens_per_s", True), ("peak PSS, GB", "pss_gb", False))
    ),
    Comparison(
        "gpu", "{shape}, one GPU, packed: tokens/s with a synchronisation after each step", "tokens_per_s_synchronised",
        {"documents": "packed", "who": "aliquot"}, ("FSDP2 + flex_attention, compiled", _TRAINER), higher=True,
    ),
    *(
        Comparison("load", f"loading {{model}}, {cache} files: {what}", column,
                   {"cache": cache, "method": "aliquot.load_sharded"}, _LOADERS, "method")
        for cache, what, column in (
            ("warm", "seconds", "seconds"), ("cold", "seconds", "seconds"),
            ("warm", "MiB beyond the rank's own part", "over own part MiB"),
        )
    ),
    *(
        Comparison("checkpoint", f"exporting {{model}}: {what}", column, {"method": "aliquot export, fsync included"},
                   ("gather to rank 0, save_pretrained",), "method")
        for what, column in (("seconds", "seconds"), ("peak MiB over the start", "peak over start MiB"))
    ),
    *(
        Comparison("disk_tier", f"{{model}} with weights and states on disk: {what}", column,
                   {"model": "500m", "place": "all on disk"}, ("DeepSpeed, all on disk",), "place", higher=up)
        for what, column, up in (("tokens/s", "tokens/s", True), ("peak GiB of the machine", "peak GiB", False))
    ),
    *(
        Comparison("prepare", f"tokenising 100 MB of short lines: {what}", column,
                   {"what": "aliquot, tokens, first time"}, (_DATASETS,), "what")
        for what, column in (("seconds", "seconds"), ("peak MiB", "memory MiB"))
    ),
)  # fmt: skip

# Benchmark -> heading, and what its figures are.
SECTIONS = {
    "step": ("Optimizer steps", "Whole steps of two ranks with one thread each: 4,096 tokens, AdamW, clipping."),
    "breakdown": ("Parts of a step", "Engine `host`, rank 0 of two. *Alone*: the same products outside a step."),
    "parts": ("Operations of a step", "Each operation against its alternative."),
    "memory": ("Memory", "500 M parameters on two ranks. *Frugal*: `train.optimizer_states: int8`."),
    "hosts": ("Several hosts", "Hosts are network namespaces of one core and one rank each, with limited links."),
    "wire": ("Bytes sent", "Bytes that two ranks send in one step, on one host and on two."),
    "disk_tier": ("Models larger than memory", "`shard.offload: disk`. *Of matmul*: rate relative to plain products."),
    "disk_tier_resume": ("Resuming from disk", "A run with `shard.offload: disk`, killed and resumed."),
    "seed_job": ("Padding and packing", "Rows of 67.6 tokens on average, 13 % of 512. Real tokens exclude padding."),
    "moe": ("Mixtures of experts", "Two ranks, 2,048 tokens per rank and step. MFU counts active parameters."),
    "moe_curve": ("Loss of a mixture", "Held-out loss of a mixture and of a dense model of the same active size."),
    "lora": ("LoRA", "Rank 16 on all linear layers, about 1,024 real tokens per rank and step."),
    "gpu": ("One GPU", "Sequences of 8,192 tokens, compiled layers."),
    "load": ("Loading", "A Hugging Face checkpoint, loaded into a sharded model."),
    "checkpoint": ("Saving and exporting", "Two ranks."),
    "prepare": ("Preparing data", "Short documents. Memory is private memory beyond imports."),
    "large_text": ("Preparing large texts", "Memory is private memory beyond imports."),
    "index": ("Indexing many documents", "*Of a core*: processor time. Memory is private memory beyond imports."),
    "states": ("Frugal optimizer states", "Evaluation loss of a fine-tuning by `train.optimizer_states`."),
    "reduce_dtype": (
        "Gradients in bf16",
        "Evaluation loss by `shard.reduce_dtype`. *Nudged*: learning rate + 0.0001 %.",
    ),
    "patches": ("Changed weights", "Size of the changed bf16 weights of a step, and speed of their encoding."),
    "long_run": ("Long runs", "*Growth*: median memory of the last tenth of the steps minus that of steps 20 to 40."),
    "foresight": ("Accuracy of plans", "*Held out*: cases that were not used to write the planner."),
}
_HEADERS = {
    "tokens_per_s": "tokens/s", "real_tokens_per_s": "real tokens/s", "mfu": "MFU",
    "peak_rss_gb": "peak RSS of a rank, GB", "loopback_mb": "loopback MB per step",
    "peak_pss_gb": "peak PSS of a rank, GB", "pss_gb": "peak PSS of a rank, GB",
    "tokens_per_s_synchronised": "tokens/s, synchronised", "aliquot_ms": "aliquot, ms", "peer_ms": "peer, ms",
    "step_s": "seconds per step", "sent_mb": "MB sent per step", "planned_s": "planned seconds",
    "planned_mb": "planned MB", "of_ceiling": "rate / ceiling", "mfu_without": "MFU without the part",
    "matmul_gflops": "matmul GFLOP/s", "plan_mib": "planned MiB", "peak_mib": "peak MiB",
    "plan_tokens_per_s": "planned tokens/s", "pss_ratio": "PSS / states", "ceiling_gflops": "matmul GFLOP/s",
    "plan_mb": "planned MB", "wire_mb": "MB sent", "one_host_mb": "MB, one host", "two_hosts_mb": "MB, two hosts",
    "planned": "planned tokens/s", "last tenth": "seconds per step, last tenth", "in the last tenth": "MiB, last tenth",
    "who": "tool", "over own part MiB": "private MiB beyond own part", "peak over start MiB": "peak MiB over the start",
    "of matmul": "rate / matmul", "moved GB a step": "GB read and written per step", "changed %": "changed weights, %",
    "of these by one %": "of these by one unit in the last place, %", "bits a weight": "bits per weight",
    "s a step, 2nd tenth": "seconds per step, 2nd tenth", "of a core, s": "processor seconds", "disk, GB": "files, GB",
    "a document is a": "a document is one", "MiB at 20-40": "MiB, steps 20 to 40", "grown MiB": "growth, MiB",
    "held_out": "held out", "memory_error": "memory error", "time_error": "time error", "wire_error": "error",
    "ours": "aliquot", "documents, M": "million documents", "pieces, M": "million pieces",
    "sequences, M": "million sequences", "on disk GB": "GB on disk", "checkpoint GB": "checkpoint, GB",
}  # fmt: skip
_HIDDEN = {
    "rates",
    "runs",
    "device",
    "gpu",
    "other_threads",
    "deepspeed_over",
    "fsdp2_over",
    "over_unlimited",
    "of_step",
}
_PERCENT = ("error", "share")


def page() -> str:
    results = newest(RESULTS)
    lines = [_HEAD, "## Against other tools", ""]
    lines += _table(
        ["compared", "hardware", "aliquot", "peer", "result of the peer", "ratio", "benchmark"],
        [row for comparison in COMPARISONS for result in results for row in compared(comparison, result)],
    )
    lines += ["", "## Hardware", "", *_hardware(results)]
    for benchmark, (heading, meaning) in SECTIONS.items():
        own = [result for result in results if result.benchmark == benchmark]
        if own:
            lines += ["", f"## {heading}", "", meaning]
        for result in own:
            lines += _section(result)
    return "\n".join(lines) + "\n"


def newest(directory: Path) -> list[Result]:
    """Return the newest result of each benchmark, hardware and part."""
    chosen: dict[tuple[str, str, str], Result] = {}
    for file in sorted(directory.glob("*.json")):
        name = _NAME.fullmatch(file.stem)
        if name is None or name["benchmark"] not in SECTIONS:
            raise SystemExit(f"{file}: expected BENCHMARK-DATE-HARDWARE[-PART].json")
        result = Result(
            *(name[key] or "" for key in ("benchmark", "date", "hardware", "part")), json.loads(file.read_text())
        )
        key = (result.benchmark, result.hardware, result.part)
        if key not in chosen or chosen[key].date < result.date:
            chosen[key] = result
    return [chosen[key] for key in sorted(chosen)]


def compared(comparison: Comparison, result: Result) -> Iterator[list[str]]:
    def row_of(who: str) -> Row | None:
        wanted = {**comparison.ours, comparison.who: who}
        return next((row for row in rows if wanted.items() <= row.items()), None)

    if result.benchmark != comparison.benchmark:
        return
    rows: list[Row] = [row for row in result.values["rows"] if isinstance(row.get(comparison.column), int | float)]
    ours = row_of(comparison.ours[comparison.who])
    for peer in comparison.peers:
        row = row_of(peer)
        if ours is None or row is None:
            continue
        own, other = ours[comparison.column], row[comparison.column]
        ratio = own / other if comparison.higher else other / own
        figures = [_text(own), peer, _text(other), f"{ratio:.2f}"]
        anchor = SECTIONS[result.benchmark][0].lower().replace(" ", "-")
        yield [comparison.what.format(**ours), result.hardware, *figures, f"[{result.benchmark}.py](#{anchor})"]


def _hardware(results: Sequence[Result]) -> list[str]:
    machines = {result.hardware: result.values["machine"] for result in sorted(results, key=lambda result: result.date)}
    rows = []
    for name, machine in sorted(machines.items()):
        memory = f"{machine['memory_limit_bytes'] / 2**30:.0f} GiB" if machine.get("memory_limit_bytes") else ""
        isa, rate = ", ".join(machine.get("isa", ())), machine.get("bf16_gflops_per_core", "")
        rows.append(
            [name, machine["cpu"], str(machine["physical_cores"]), memory, isa, rate, ", ".join(machine["gpus"])]
        )
    headers = ["name", "processor", "cores", "memory", "instructions", "bf16 GFLOP/s per core, measured", "GPU"]
    return _table(headers, rows)


def _section(result: Result) -> Iterator[str]:
    values = result.values
    machine, mark = values["machine"], "\\*" if "source" in values else ""
    versions = {name: machine[name] for name in ("torch", "transformers")} | values.get("peers", {})
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    command = f"`{values['command']}`" if values["command"].startswith("python ") else values["command"]
    note = f" ({values['note']})" if "note" in values else ""
    yield from ["", f"**{result.hardware}**{mark}, {result.date}, {values['title']}{note}. {software}. {command}"]
    tables: list[list[Row]] = []
    for row in values["rows"]:
        names = row.keys() - {"note"}
        if not tables or not (names <= tables[-1][0].keys() or names >= tables[-1][0].keys()):
            tables.append([])
        tables[-1].append(row)
    for rows in tables:
        columns = [
            name
            for name in dict.fromkeys(name for row in rows for name in row)
            if name not in _HIDDEN and any(row.get(name) not in (None, "") for row in rows)
        ]
        cells = [[_text(row.get(name), name.endswith(_PERCENT)) for name in columns] for row in rows]
        yield from ["", *_table([_HEADERS.get(name, name) for name in columns], cells)]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [headers, ["--"] * len(headers), *rows]
    return ["| " + " | ".join(cells) + " |" if cells[0] != "--" else "|" + "|".join(cells) + "|" for cells in lines]


def _text(value: Any, percent: bool = False) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
    if not isinstance(value, int | float):
        return str(value)
    if percent:
        return f"{100 * value:.3g} %"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    PAGE.write_text(page())
