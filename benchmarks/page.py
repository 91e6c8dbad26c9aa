"""Write docs/reference/benchmarks.md from the newest result files: `python -m benchmarks.page`.

A result file is benchmarks/results/BENCHMARK-DATE-HARDWARE[-PART].json, as `--json` of a benchmark writes it. PART
separates runs of one benchmark that measure different things. tests/test_benchmarks.py keeps the page up to date.
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
because the speed of shared machines varies.

**To repeat them**, in a clone of the repository: `make bench` installs aliquot and DeepSpeed into `.venv`, and runs the
CPU benchmarks. It takes two to three hours and 20 GB of disk. `hosts.py` also needs root, for network namespaces. To
repeat one benchmark, run the command above its table in `.venv` after `make install` and
`.venv/bin/pip install -c constraints.txt -e '.[dev,deepspeed]'`. Peers that are not installed get a line that says so.

- **host**, **fsdp**: engines of aliquot. **125m**, **500m**, **1b**: Llama models with that many parameters.
- **MFU**: model FLOP/s divided by the rate of plain matrix products on all ranks at once, measured in the same run.
- **packed**: documents of 65 tokens on average, isolated from each other. In other cases, documents fill sequences.
- **tuned**: the peer runs with aliquot's allocator (tcmalloc, or **glibc** where the hardware says so) and one core per
  rank. DeepSpeed runs under HF Trainer.
- **ratio**: how many times aliquot is better than the peer: faster, or smaller in seconds, bytes and memory.
- **hardware**: a machine of the [last table](#hardware). After a comma: what distinguishes several results of it.
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
    """Figures of aliquot and of its peers in the rows of one result file.

    Args:
        subject: a format string with names of columns in braces.
        figures: column -> name of the figure.
        ours: values of aliquot's rows.
        peers: the peers, as column `who` names them.
        same: columns in which a peer's row equals aliquot's.
    """

    benchmark: str
    subject: str
    figures: dict[str, str]
    ours: dict[str, Any]
    peers: tuple[str, ...]
    same: tuple[str, ...] = ()
    who: str = "who"


_TOKENS = {"tokens_per_s": "tokens/s"}
_PEERS = ("DeepSpeed ZeRO-3, tuned", "plain FSDP2, tuned")
COMPARISONS = (
    Comparison(
        "step",
        "training {shape}",
        _TOKENS | {"peak_rss_gb": "peak RSS of a rank, GB"},
        {"who": "host"},
        _PEERS,
        ("shape",),
    ),
    Comparison(
        "hosts",
        "training {shape} on {hosts} hosts, 1 Gbit/s, bf16 gradients",
        {"step_s": "seconds per step", "sent_mb": "MB sent per step"},
        {"who": "aliquot, reduce_dtype bf16", "link": "1gbit"},
        ("HF Trainer + DeepSpeed ZeRO-3", "FSDP2"),
        ("shape", "hosts", "link"),
    ),
    Comparison(
        "seed_job",
        "training 125m on records of wikitext-2",
        {"real_tokens_per_s": "real tokens/s"},
        {"who": "aliquot, packed"},
        ("DeepSpeed, padded to 512", "DeepSpeed, each record at its length", "DeepSpeed, concatenated and split"),
    ),
    Comparison(
        "moe", "training a mixture of experts, {shape}", _TOKENS, {"who": "host, full sequences"}, _PEERS, ("shape",)
    ),
    Comparison(
        "lora",
        "LoRA, {work}",
        _TOKENS | {"pss_gb": "peak PSS of a rank, GB"},
        {"who": "aliquot, LoRA"},
        ("peft + HF Trainer + DDP",),
        ("work",),
    ),
    Comparison(
        "dpo",
        "DPO, 125m",
        {"step_s": "seconds per step", "pss_gb": "peak PSS of a rank, GB"},
        {"who": "aliquot"},
        (
            "TRL + DeepSpeed ZeRO-3, reference in memory",
            "TRL + DeepSpeed ZeRO-3, reference given",
            "TRL + DeepSpeed ZeRO-3, reference given, gradient checkpointing",
            "TRL + DDP",
        ),
    ),
    Comparison(
        "gpu",
        "training {shape} on one GPU, sequences per step: {rows}, documents {documents}",
        {"tokens_per_s_synchronised": "tokens/s, synchronised"},
        {"who": "aliquot"},
        ("FSDP2 + flex_attention", "HF Trainer", "DeepSpeed ZeRO-3"),
        ("shape", "rows", "documents"),
    ),
    Comparison(
        "load",
        "loading {model}, {cache} files",
        {"seconds": "seconds", "over own part MiB": "private MiB beyond own part"},
        {"method": "aliquot.load_sharded"},
        (
            "transformers + DeepSpeed zero.Init",
            "transformers DistributedConfig(fsdp_size)",
            "torch DCP HuggingFaceStorageReader",
        ),
        ("model", "cache"),
        "method",
    ),
    Comparison(
        "checkpoint",
        "exporting {model}",
        {"seconds": "seconds", "peak over start MiB": "peak MiB over the start"},
        {"method": "aliquot export, with fsync"},
        ("gather to rank 0, save_pretrained",),
        who="method",
    ),
    Comparison(
        "disk_tier",
        "training {model}, weights and states on disk",
        {"tokens/s": "tokens/s", "peak GiB": "peak GiB of the machine"},
        {"place": "all on disk"},
        ("DeepSpeed, all on disk",),
        ("model",),
        "place",
    ),
    Comparison(
        "prepare",
        "tokenising {lines} lines",
        {"seconds": "seconds", "memory MiB": "peak MiB"},
        {"what": "aliquot, tokens, first time"},
        ("datasets, tokens (map, one process per core), first time",),
        who="what",
    ),
)

# Benchmark -> heading, and what its figures are.
SECTIONS = {
    "step": ("Optimizer steps", "Whole steps of two ranks with one thread each: 4,096 tokens, AdamW, clipping."),
    "breakdown": ("Parts of a step", "Engine `host`, rank 0 of two. *Alone*: the same products outside a step."),
    "parts": ("Operations of a step", "Each operation against its alternative."),
    "memory": ("Memory", "500 M parameters on two ranks. *Compressed*: `train.optimizer_states: int8`."),
    "hosts": ("Several hosts", "Hosts are network namespaces of one core and one rank each, with limited links."),
    "scale": (
        "Many ranks",
        "Counts of the median rank, of a tiny model. Hosts are simulated on one machine. Seconds are CPU seconds."
        " *Exponent*: of growth with the number of ranks; 1 is linear.",
    ),
    "wire": ("Bytes sent", "Bytes that two ranks send in one step, on one host and on two."),
    "disk_tier": ("Models larger than memory", "`shard.offload: disk`. *Of matmul*: rate relative to plain products."),
    "disk_tier_resume": ("Resuming from disk", "A run with `shard.offload: disk`, killed and resumed."),
    "seed_job": ("Padding and packing", "Records of 67.6 tokens on average, 13 % of 512. Real tokens exclude padding."),
    "moe": ("Mixtures of experts", "Two ranks, 2,048 tokens per rank and step. MFU counts active parameters."),
    "moe_curve": ("Loss of a mixture", "Held-out loss of a mixture and of a dense model of the same active size."),
    "lora": ("LoRA", "Rank 16 on all linear layers, about 1,024 real tokens per rank and step."),
    "dpo": ("DPO", "Eight pairs per step on two ranks. *Before*: data, reference and the first step."),
    "sampling": ("Sampling during training", "Prompts of 32 tokens, continued by 64 tokens, one thread per rank."),
    "gpu": ("One GPU", "Sequences of 8,192 tokens, compiled layers. *Rows*: sequences per step, each a micro-batch."),
    "load": ("Loading", "A Hugging Face checkpoint, loaded into a sharded model."),
    "checkpoint": ("Saving and exporting", "Two ranks."),
    "prepare": ("Preparing data", "Short documents. Memory is private memory beyond imports."),
    "large_text": ("Preparing large texts", "Memory is private memory beyond imports."),
    "index": ("Indexing many documents", "*Of a core*: processor time. Memory is private memory beyond imports."),
    "states": ("Compressed optimizer states", "Evaluation loss of a fine-tuning by `train.optimizer_states`."),
    "reduce_dtype": (
        "Gradients in bf16",
        "Evaluation loss by `shard.reduce_dtype`. *Nudged*: learning rate + 0.0001 %.",
    ),
    "patches": ("Changed weights", "Size of the changed bf16 weights of a step, and speed of their encoding."),
    "long_run": ("Long runs", "*Growth*: median memory of the last tenth of the steps minus that of steps 20 to 40."),
    "fine_tune": (
        "A fine-tune of a real model",
        "Greedy answers to 200 held-out questions, of which 20 are shown. *Similarity*: the ratio of Python's difflib.",
    ),
    "foresight": ("Accuracy of plans", "The plan of each run, and what the run needed."),
}
_HEADERS = {
    "tokens_per_s": "tokens/s", "real_tokens_per_s": "real tokens/s", "mfu": "MFU",
    "peak_rss_gb": "peak RSS of a rank, GB", "loopback_mb": "loopback MB per step",
    "peak_pss_gb": "peak PSS of a rank, GB", "pss_gb": "peak PSS of a rank, GB",
    "tokens_per_s_synchronised": "tokens/s, synchronised", "ceiling_tflops": "matrix products, TFLOP/s",
    "reserved_gib": "GPU memory, GiB", "aliquot_ms": "aliquot, ms", "peer_ms": "peer, ms",
    "step_s": "seconds per step", "sent_mb": "MB sent per step", "planned_s": "planned seconds",
    "before_s": "seconds before the second step",
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
    "memory_error": "memory error", "time_error": "time error", "wire_error": "error",
    "ours": "aliquot", "documents, M": "million documents", "pieces, M": "million pieces",
    "of a pair": "connections of two ranks of different hosts, at most", "idle": "connections without messages",
    "peers": "connected ranks", "descriptors, rank 0": "file descriptors, rank 0",
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
    "held_out",
}
_PERCENT = ("error", "share")


def page() -> str:
    results = newest(RESULTS)
    lines = [_HEAD, "## Against other tools", ""]
    lines += _table(
        ["compared", "hardware", "aliquot", "peer", "result of the peer", "ratio", "benchmark"],
        [row for comparison in COMPARISONS for row in compared(comparison, results)],
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
            name["benchmark"], name["date"], name["hardware"], name["part"] or "", json.loads(file.read_text())
        )
        key = (result.benchmark, result.hardware, result.part)
        if key not in chosen or chosen[key].date < result.date:
            chosen[key] = result
    return [chosen[key] for key in sorted(chosen)]


def compared(comparison: Comparison, results: Sequence[Result]) -> Iterator[list[str]]:
    """Yield one row of the page for each figure, result file and peer."""
    for column, figure in comparison.figures.items():
        for result in results:
            if result.benchmark != comparison.benchmark:
                continue
            rows: list[Row] = [row for row in result.values["rows"] if isinstance(row.get(column), int | float)]
            for ours in rows:
                if not comparison.ours.items() <= ours.items():
                    continue
                same = {name: ours[name] for name in comparison.same}
                for peer in comparison.peers:
                    for row in rows:
                        if (same | {comparison.who: peer}).items() <= row.items():
                            yield _compared(comparison, result, figure, (ours, row), column)


def _compared(comparison: Comparison, result: Result, figure: str, rows: tuple[Row, Row], column: str) -> list[str]:
    ours, peer = (row[column] for row in rows)
    ratio = ours / peer if "tokens/s" in figure else peer / ours
    subject = comparison.subject.format(**{name: _text(value) for name, value in rows[0].items()})
    anchor = SECTIONS[result.benchmark][0].lower().replace(" ", "-")
    figures = [_text(ours), rows[1][comparison.who], _text(peer), f"{ratio:.3g}"]
    hardware = ", ".join(filter(None, (result.hardware, result.part)))
    return [f"{subject}: {figure}", hardware, *figures, f"[{result.benchmark}.py](#{anchor})"]


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
        return " ".join(str(value).split()).replace("|", "\\|")
    if percent:
        return f"{100 * value:.3g} %"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    PAGE.write_text(page())
