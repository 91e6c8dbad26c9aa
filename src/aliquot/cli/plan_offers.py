"""aliquot plan --tokens: find EC2 types and numbers of nodes to train on so many tokens, with time and cost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aliquot.catalogue.instances import SPOT_FRACTION, catalogue
from aliquot.cli.terminal import print_notes, progress, show_table
from aliquot.core.errors import UsageError, UserError
from aliquot.core.number_format import dollars

if TYPE_CHECKING:
    from aliquot.config.schema import RunConfig
    from aliquot.planner.offers import Offer, OfferRequest, Spot

_MAX_ROWS = 12
_OPTIONAL_COLUMNS = ("checkpointing", "restarts", "micro", "batch", "ranks", "save every")  # omitted if narrow
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MANY_SAVES = 0.1  # above this fraction of the time of a run, saves are worth a note
_GPU_TYPES = 3  # types that are planned with all settings, for a note beside offers of CPU nodes
_MAX_BATCHES = 4  # each batch size is planned on every instance type


def print_offers(
    config: RunConfig,
    request: OfferRequest,
    document_tokens: int | None,
    picture: Path | None,
    as_json: bool,
    run: Sequence[str],
) -> None:
    """Print the offers, the best first. Raises UserError if no offer fits.

    Args:
        run: the config file and the overrides of the command, for a command to paste.
    """
    from aliquot.cluster.job import placed
    from aliquot.core.errors import writing
    from aliquot.data.workload import Workload
    from aliquot.planner.offers import offers
    from aliquot.planner.pictures import offers_svg
    from aliquot.planner.planned_model import with_model_limits

    config = placed(config) if config.cluster is not None else config
    with progress() as update:
        update("analysing the model")
        config = with_model_limits(config)
        results = offers(config, Workload.assumed(config, document_tokens), request, update)
    title = f"{request.tokens:,} tokens of {results[0].plan.model} ({results[0].plan.size})"
    if as_json:
        rows = [offer.as_json() for offer in results]
        print(json.dumps({"tokens": request.tokens, "goal": request.goal, "offers": rows}, indent=1))
    else:
        _print_table(results, f"{title}, least {request.goal} first")
        print_notes(*_notes(results, request.spot))
        more = [] if document_tokens is None else ["--document-tokens", str(document_tokens)]
        if config.launch.device == "cpu" and request.instance is None:
            print(_gpu_note(config, document_tokens, request))
        print(f"command for the first offer: {results[0].command(run, more)}")
    if picture is not None:
        with writing(picture):
            picture.write_text(offers_svg(results, title))


def _gpu_note(config: RunConfig, document_tokens: int | None, request: OfferRequest) -> str:
    """Return a line with the best offer of GPU nodes, for a config that asks for CPU nodes."""
    from aliquot.data.workload import Workload
    from aliquot.planner.automatic_settings import with_settings
    from aliquot.planner.offers import offers

    try:
        on_gpus = with_settings(config, {"launch.device": "cuda"})
        best = offers(on_gpus, Workload.assumed(on_gpus, document_tokens), request, types_searched=_GPU_TYPES)[0]
    except UserError as error:
        return f"on GPUs: {error}"
    return f"on GPUs from {_price(best)}; launch.device=auto offers both kinds"


def _price(offer: Offer) -> str:
    what = f"{offer.plan.nodes} x {offer.plan.instance}, {offer.bought}, {offer.total_s / 3600:,.1f} hours"
    return f"{dollars(offer.usd)} USD ({what})"


def _print_table(results: Sequence[Offer], title: str) -> None:
    shown = results[:_MAX_ROWS]
    columns: dict[str, list[str]] = {
        "nodes": [str(offer.plan.nodes) for offer in shown],
        "type": [str(offer.plan.instance) for offer in shown],
        "bought": [offer.bought for offer in shown],
        "hours": [f"{offer.total_s / 3600:,.1f}" for offer in shown],
        "USD": [dollars(offer.usd) for offer in shown],
        "restarts": [f"{offer.restarts:.2g}" for offer in shown],
        "tokens/s": [f"{offer.plan.tokens_per_s:,.0f}" for offer in shown],
        "ranks": [str(offer.plan.ranks_per_node) for offer in shown],
        "batch": [str(offer.global_batch) for offer in shown],
        "micro": [str(offer.plan.micro_batch) for offer in shown],
        "checkpointing": [offer.plan.gradient_checkpointing for offer in shown],
        "save every": [f"{offer.every:,} steps" for offer in shown],
    }
    show_table(columns, _OPTIONAL_COLUMNS, ("type",), title)


def _notes(results: Sequence[Offer], spot: Spot) -> list[tuple[object, str]]:
    """Return what the table of offers leaves open, for `print_notes`."""
    best, shown = results[0], results[:_MAX_ROWS]
    off_by = max(offer.plan.off_by for offer in shown)
    surer = next((offer for offer in results if offer.bought in ("on-demand", "spot")), None)
    others = f"; the first other offer: {_price(surer)}" if surer and best.bought != best.capacity else ""
    hours = f"{best.plan.saving_s / 3600:,.1f} of {best.plan.total_s / 3600:,.1f} hours"
    has_spot_prices = spot.price is None and any(ec2.spot_usd_per_hour is not None for ec2 in catalogue().types)
    losses = f"{100 * spot.lost_a_month:g} % of nodes lost a month"
    prices = f"; spot: {spot.price or SPOT_FRACTION:g} of them, {losses}, both assumed (--spot-price, --spot-losses"
    if has_spot_prices:
        prices = f", on demand and on spot; {losses} on spot, assumed (--spot-losses"
    return [
        (off_by > 1, f"tokens/s, hours and USD are estimates: a factor of {off_by:.2g} either way"),
        (
            True,
            f"hours begin when nodes are asked for: {best.start_s / 60:.0f} minutes of the first offer until it trains",
        ),
        (
            any(offer.bought != offer.capacity for offer in shown),
            f"rarely free: AWS reserves such nodes as Capacity Blocks (cluster.capacity: [reserved]){others}",
        ),
        (
            best.plan.saving_s > _MANY_SAVES * best.plan.total_s,
            f"saves take {hours} of the first offer: a faster file system (cluster.storage) takes less",
        ),
        (True, f"{len(results)} offers, each the best of its type, nodes and way to buy; {best.plan.rates}"),
        (True, f"prices {catalogue().source}{prices}: see AWS' Spot Instance Advisor)"),
    ]


def parse_tokens(text: str) -> int:
    """Parse a number of tokens such as `1B`, `300M` or `2.5e9`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([KMBT]?)", text.strip(), re.IGNORECASE)
    number = int(float(match[1]) * _FACTORS[match[2].upper()]) if match is not None else 0
    if not 1 <= number <= 10**15:
        raise UsageError(f"--tokens {text} is no number of tokens: write one like 1B, 300M or 2.5e9")
    return number


def parse_batches(text: str) -> list[int]:
    """Parse `64` or a range such as `32-256` into batch sizes.

    A range gives its lower end, doublings of it, and its upper end, thinned out to at most four sizes.
    """
    match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"--global-batch {text} is no number and no range of sequences: write 64 or 32-256")
    doublings = [low << times for times in range(high.bit_length()) if low << times < high]
    sizes = [*doublings, high]
    stride = max(1.0, (len(sizes) - 1) / (_MAX_BATCHES - 1))
    return list(dict.fromkeys(sizes[min(len(sizes) - 1, round(number * stride))] for number in range(_MAX_BATCHES)))
